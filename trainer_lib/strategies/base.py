"""This file is the strategy of one process, and with it what every strategy can be asked to do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.modules.state import inner_module, load_module_state, module_state
from trainer_lib.options.base import KwargsHandler
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies import grad_norm as gradients
from trainer_lib.strategies.optimizer_state_names import load_named_state, named_state

_NOTHING = nullcontext()  # one for all: it is entered on each micro-batch that does not update


@dataclass
class Joined:
    """What became of a block in which the data of some processes may have ended early.

    Args:
        given: The models whose unfinished gradients on this process went into an update of the others.
        source: The process that made all updates, if some others missed any.
    """

    given: list[nn.Module] = field(default_factory=list[nn.Module])
    source: int | None = None


class SingleProcess:
    """The model as it is; other strategies state what they do differently."""

    # Whether a state on disk is one of shards, each written by the process that holds it.
    writes_shards: bool = False
    # Whether the main process alone has whole tensors, and hands the others what they need of them.
    hands_out: bool = False
    # Whether a forward on one process waits for one on the others.
    needs_lockstep: bool = False

    def __init__(self, group: ProcessGroup, device: torch.device, options: KwargsHandler | None = None) -> None:
        self.group = group
        self.device = device
        self.options = options
        self._carried: Sequence[float | Tensor] = ()

    def place(self, model: nn.Module) -> nn.Module:
        """Bring the model to this process's device."""
        return model.to(self.device)

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Return the model as the processes share it.

        Args:
            model: The model.
            evaluation_mode: It is only evaluated, so its gradients need not be shared.
        """
        del evaluation_mode
        return model

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before `distribute` train what that put in the place of its parameters."""

    def trained(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Return those of `parameters` that optimizers have, for what a forward may leave in their place."""
        return parameters

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside what `distribute` made."""
        return model

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return what to call for a forward without gradients. Every process has to ask.

        Unless the strategy `needs_lockstep`, its forward sends nothing: the processes may make as many as they like.
        """
        return self.unwrap(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` keeps gradients to this process."""
        del model
        return _NOTHING

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` shares gradients of a forward that ran in `no_sync`."""
        del model
        return _NOTHING

    def withholds_gradients(self) -> bool:
        """Whether gradients of a forward in `no_sync` are where no parameter's `grad` shows them."""
        return False

    def carry(self, values: Sequence[float | Tensor]) -> None:
        """Average `values` over the processes, along with the gradients of the next `backward`."""
        self._carried = values

    def carried(self) -> Sequence[float | Tensor]:
        """Return the averages of what `carry` was given, after `backward`."""
        values, self._carried = self._carried, ()
        return values

    def check_apart(self) -> None:
        """Raise if processes cannot compute apart, from `begin_apart` to `put_together`."""

    def begin_apart(self, models: Sequence[nn.Module]) -> None:
        """Share what forwards rest on, so that those in `no_sync` send nothing. Every process has to call it."""
        del models

    def put_together(self, models: Sequence[nn.Module], values: Sequence[float | Tensor]) -> Sequence[float | Tensor]:
        """Average over the processes the gradients of backwards in `no_sync`, and return the averages of `values`."""
        del models
        return values

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], dict[nn.Module, float | Tensor]] | None
    ) -> AbstractContextManager[Joined]:
        """Return the block of a loop whose data may end early on some processes, which then follow the others.

        Args:
            joinables: The models, and whatever else sends messages in a step and can answer those of others.
            leftovers: Returns, at the end of this process's data, the models whose windows are unfinished and what
                their losses weigh; `None` where each micro-batch updates.
        """
        del joinables, leftovers
        return nullcontext(Joined())

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which each process trains a model of its own."""
        return self.no_sync(model)

    def average_weights(self, model: nn.Module) -> None:
        """Overwrite the weights with their mean over the processes."""

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Shrink the gradients to a norm of at most `max_norm` over all of them, and return the norm before."""
        return gradients.clip_whole(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Cut each gradient to at most `clip_value` in size."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over all gradients; `in_double`: computed where squares of large values do not overflow."""
        return gradients.norm_of_whole(parameters, norm_type, in_double)

    def shrink_gradients(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Shrink gradients whose norm is known to a norm of at most `max_norm`."""
        gradients.shrink(parameters, max_norm, norm)

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside whatever distributes or compiles it."""
        return inner_module(self.unwrap(inner_module(model)))

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's tensors under the names its author knows. Every process has to ask.

        Args:
            model: The prepared model.
            whole: Whole tensors, where a strategy has parts of them; the main process's count. Else what is here.
        """
        del whole
        return module_state(self.bare(model))

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `model_state` returned. Every process has to ask.

        Raises:
            StateError: If names (with `strict`) or shapes differ.
        """
        load_module_state(self.bare(model), state, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state by names of parameters. Every process has to ask.

        Args:
            optimizer: The optimizer.
            models: The prepared models, whose parameters it has; with several, names begin with the model's number.
            whole: See `model_state`.
        """
        del whole
        return named_state(optimizer, [self.bare(model) for model in models])

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` returned. Every process has to ask.

        Raises:
            StateError: If its groups hold other parameters.
        """
        load_named_state(optimizer, [self.bare(model) for model in models], state)

    def release(self) -> None:
        """Let go of the models."""
