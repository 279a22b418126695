"""`ReplicatedParameters`: averages the gradients of weights that several ranks hold and FSDP does not shard."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.clip_grad_norm import local_values
from trainer_lib.strategies.ddp.param_averaging import average


class ReplicatedParameters:
    """Averages the gradients of weights over the ranks at the end of each backward that synchronizes.

    Args:
        parameters: The weights, in the same order on all ranks.
        group: The ranks that hold the same weights, and have different gradients.

    Attributes:
        are_averaged: Whether other ranks hold the same weights.
    """

    def __init__(self, parameters: Iterable[Tensor], group: ProcessGroup) -> None:
        self.synchronizes = True
        self.are_averaged: bool = group.size > 1
        self._parameters = [p for p in parameters if _may_train(p)] if self.are_averaged else []
        self._trained: set[Tensor] = set()  # now, or at an earlier average
        self._group = group
        self._is_due = False
        # torch keeps a parameter's hooks where the garbage collector does not look, so that a hook that refers to the
        # parameter would keep it in memory until the process ends.
        queue = WeakMethod(self._queue_average)
        self._hooks = [_hooked(parameter, partial(_call, queue)) for parameter in self._parameters]

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
            engine.queue_callback(self.average)

    def average(self) -> None:
        """Average the gradients now; what is averaged already stays as it is."""
        self._is_due = False
        self._trained.update(parameter for parameter in self._parameters if parameter.requires_grad)
        trained = [parameter for parameter in self._parameters if parameter in self._trained]
        sparse = [parameter for parameter in trained if parameter.grad is not None and parameter.grad.is_sparse]
        for parameter in sparse:  # ranks have gradients of other rows
            parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
        # A weight that this rank did not use counts with zeros: other ranks may have used it.
        unused = {number: parameter for number, parameter in enumerate(trained) if parameter.grad is None}
        for parameter in unused.values():
            parameter.grad = torch.zeros_like(parameter)
        values = local_values([parameter.grad for parameter in trained if parameter.grad is not None])
        if not values:
            return
        users = torch.ones(len(values), dtype=values[0].dtype, device=values[0].device)
        for number in unused:
            users[number] = 0.0
        average([users, *values], self._group)
        for number, parameter in unused.items():
            if not users[number]:
                parameter.grad = None
        for parameter in sparse:
            parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse(1)


def _may_train(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _hooked(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook for gradients; a frozen parameter takes none, and may be trained later."""
    is_trained = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)
    return handle


def _call(queue: "WeakMethod[Callable[[Tensor], None]]", tensor: Tensor) -> None:
    method = queue()
    if method is not None:
        method(tensor)
