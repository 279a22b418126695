"""This file is the strategy of one process, and with it what every strategy can be asked to do."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.options.base import KwargsHandler
from trainer_lib.process_group import ProcessGroup

_NOTHING = nullcontext()  # one for all: it is entered on each micro-batch that does not update


class SingleProcess:
    """The model as it is; other strategies state what they do differently."""

    def __init__(self, group: ProcessGroup, device: torch.device, options: KwargsHandler | None = None) -> None:
        self.group = group
        self.device = device
        self.options = options
        self._carried: Sequence[float | Tensor] = ()

    def place(self, model: nn.Module) -> nn.Module:
        """Bring the model to this process's device."""
        return model.to(self.device)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Return the model as the processes share it."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside what `distribute` made."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` keeps gradients to this process."""
        del model
        return _NOTHING

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` shares gradients of a forward that ran in `no_sync`."""
        del model
        return _NOTHING

    def carry(self, values: Sequence[float | Tensor]) -> None:
        """Average `values` over the processes, along with the gradients of the next `backward`."""
        self._carried = values

    def carried(self) -> Sequence[float | Tensor]:
        """Return the averages of what `carry` was given, after `backward`."""
        values, self._carried = self._carried, ()
        return values

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Shrink the gradients to a norm of at most `max_norm` over all of them, and return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm over all gradients."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def release(self) -> None:
        """Let go of the models."""
