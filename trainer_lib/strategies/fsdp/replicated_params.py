"""This file is the trainable weights that sharding leaves whole on each process: their gradients are averaged here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from trainer_lib.foundation.pytree import tensors
from trainer_lib.process_group import ProcessGroup


class Replicas:
    """Averages the gradients of whole weights over the processes at the end of each backward that synchronizes.

    Args:
        parameters: The weights, in an order on which all processes agree.
        group: The processes.
    """

    def __init__(self, parameters: Iterable[Tensor], group: ProcessGroup) -> None:
        self.synchronizes = True
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._group = group
        self._is_due = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._at_the_end) for p in self._parameters]

    def release(self) -> None:
        """Leave the weights alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def watch(self, outputs: Any) -> None:
        """Average after the backward of `outputs` too: others may have used weights that this process did not."""
        for output in tensors(outputs) if self._parameters else ():
            if output.requires_grad:
                output.register_hook(self._at_the_end)

    def _at_the_end(self, tensor: Tensor) -> None:
        del tensor
        if self.synchronizes and not self._is_due:
            self._is_due = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_due = False
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_type.values():
            # A weight that this process did not use weighs in with zeros: others may have.
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            together = torch.cat([gradient.reshape(-1) for gradient in own])
            average = self._group.all_reduce(together).div_(self._group.size)
            for parameter, part in zip(parameters, average.split([p.numel() for p in parameters]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter))
                elif part.any():
                    parameter.grad = part.view_as(parameter).clone()
