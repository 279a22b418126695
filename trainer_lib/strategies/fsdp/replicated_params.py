"""`ReplicatedParameters`: averages the gradients of weights that several ranks hold and FSDP does not shard."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Variable

from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.clip_grad_norm import local_values
from trainer_lib.strategies.ddp.param_averaging import average


class ReplicatedParameters:
    """Averages the gradients of weights over the ranks at the end of each backward that synchronizes.

    Args:
        parameters: The weights, in the same order on all ranks.
        group: The ranks that hold the same weights, and have different gradients.
    """

    def __init__(self, parameters: Iterable[Tensor], group: ProcessGroup) -> None:
        self.synchronizes = True
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._parameters = trained if group.size > 1 else []
        self._group = group
        self._is_due = False
        # torch keeps a parameter's hooks where the garbage collector does not look, so that a hook that refers to the
        # parameter would keep it in memory until the process ends.
        queue = WeakMethod(self._queue_average)
        self._hooks = [p.register_post_accumulate_grad_hook(partial(_call, queue)) for p in self._parameters]

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
        # A weight that this rank did not use counts with zeros: other ranks may have used it.
        unused = [parameter for parameter in self._parameters if parameter.grad is None]
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        average(local_values(gradients), self._group)
        for parameter in unused:
            if parameter.grad is not None and not any(value.any() for value in local_values([parameter.grad])):
                parameter.grad = None


def _call(queue: "WeakMethod[Callable[[Tensor], None]]", tensor: Tensor) -> None:
    method = queue()
    if method is not None:
        method(tensor)
