"""`ReplicatedParameters`: averages the gradients of weights that FSDP does not shard."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from trainer_lib.foundation.pytree import tensors
from trainer_lib.process_group import ProcessGroup


class ReplicatedParameters:
    """Averages the gradients of whole weights over the ranks at the end of each backward that synchronizes.

    Args:
        parameters: The weights, in the same order on all ranks.
        group: The process group of all ranks.
    """

    def __init__(self, parameters: Iterable[Tensor], group: ProcessGroup) -> None:
        self.synchronizes = True
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._group = group
        self._is_due = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._queue_average) for p in self._parameters]

    def release(self) -> None:
        """Remove the hooks from the weights."""
        for hook in self._hooks:
            hook.remove()

    def watch(self, outputs: Any) -> None:
        """Average after the backward of `outputs` too: other ranks may have used weights that this rank did not."""
        for output in tensors(outputs) if self._parameters else ():
            if output.requires_grad:
                output.register_hook(self._queue_average)

    def _queue_average(self, tensor: Tensor) -> None:
        del tensor
        if self.synchronizes and not self._is_due:
            self._is_due = True
            # The only way to run code at the end of a backward; FSDP takes it too.
            engine: Any = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
            engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_due = False
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_type.values():
            # A weight that this rank did not use counts with zeros: other ranks may have used it.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            average = self._group.all_reduce(flat).div_(self._group.size)
            for parameter, part in zip(parameters, average.split([p.numel() for p in parameters]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter))
                elif part.any():
                    parameter.grad = part.view_as(parameter).clone()
