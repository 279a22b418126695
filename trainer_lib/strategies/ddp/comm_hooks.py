"""This file is compressing gradients on their way between processes, a bucket of DDP's at a time."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.enums import DDPCommunicationHookType as Kind

# How a bucket of gradients becomes its average over the processes.
Travel = Callable[[dist.GradBucket], Future[Tensor]]

_CASTS: dict[str, torch.dtype] = {Kind.FP16: torch.float16, Kind.BF16: torch.bfloat16}
# A column of zeros cannot be brought to length 1, so something too small to matter is added to what divides it.
_EPSILON, _EPSILON_OF_FP16 = 1e-30, 1e-7


def averaged(bucket: dist.GradBucket) -> Future[Tensor]:
    """Average the gradients as they are."""
    return summed(bucket.buffer()).then(lambda future: future.value()[0].div_(dist.get_world_size()))


def travel_of(options: DistributedDataParallelKwargs | None) -> Callable[[], Travel]:
    """Return what makes the way to average that options ask for; each model needs one of its own."""
    if options is None:
        return lambda: averaged
    hook, cast, arguments = options.comm_hook, _CASTS.get(options.comm_wrapper), options.comm_state_option
    if hook in (Kind.POWER_SGD, Kind.BATCHED_POWER_SGD):
        return lambda: PowerSGD(arguments, cast, batched=hook == Kind.BATCHED_POWER_SGD)
    cast = _CASTS.get(hook, cast)
    return lambda: averaged if cast is None else Cast(cast)


def summed(tensor: Tensor) -> Future[list[Tensor]]:
    """Begin to add up the tensors of all processes, in place."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


class Cast:
    """Send gradients in 16 bits, by any backend (torch's own hook for bf16 knows NCCL only).

    Args:
        dtype: What to send them as, if that is smaller than what they are.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        if not _is_worth(gradients, self._dtype):
            return averaged(bucket)
        # Divided while there are digits to spare: the sum of many would leave the range of fp16.
        sent = gradients.div_(dist.get_world_size()).to(self._dtype)
        return summed(sent).then(lambda future: gradients.copy_(future.value()[0]))


class PowerSGD:
    """Send two thin factors of each matrix of gradients, by torch's PowerSGD.

    Args:
        arguments: Those of `PowerSGDState`.
        dtype: What to send the factors as.
        batched: Take a whole bucket for one square matrix.
    """

    def __init__(self, arguments: dict[str, Any], dtype: torch.dtype | None = None, batched: bool = False) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        epsilon = _EPSILON_OF_FP16 if dtype is torch.float16 else _EPSILON
        own: dict[str, Any] = {"orthogonalization_epsilon": epsilon}
        self._state = torchs.PowerSGDState(None, **{**own, **arguments})
        self._hook: Callable[[Any, Any], Future[Tensor]] = torchs.powerSGD_hook
        self._dtype, self._batched = dtype, batched

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        if gradients.is_sparse:
            self._state.maybe_increase_iter(bucket)
            return averaged(bucket)
        if self._dtype is not None and _is_worth(gradients, self._dtype):
            bucket.set_buffer(gradients.to(self._dtype))
        future = self._hook(self._state, (_Square if self._batched else _Matrices)(bucket))
        if gradients.device.type == "cpu":
            # Each bucket takes several messages, the later ones sent from gloo's threads. Of two buckets under way
            # they would mix, in another order on each process.
            future.wait()
        return future.then(lambda done: gradients.copy_(done.value()[: gradients.numel()]))


class _Matrices:
    """A bucket whose gradients all have a dimension, as torch's PowerSGD takes for granted."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        self._buffer = bucket.buffer()
        self._gradients = [torch.atleast_1d(gradient) for gradient in bucket.gradients() if gradient.numel()]
        self.index, self.is_last = bucket.index, bucket.is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients


class _Square(_Matrices):
    """A bucket that is one square matrix, filled up with zeros (torch's own batched hook fails on its first check)."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        super().__init__(bucket)
        gradients = bucket.buffer()
        side = math.ceil(math.sqrt(gradients.numel()))
        self._buffer = gradients.new_zeros(side * side)
        self._buffer[: gradients.numel()] = gradients
        self._gradients = [self._buffer.view(side, side)]


def _is_worth(gradients: Tensor, dtype: torch.dtype) -> bool:
    return not gradients.is_sparse and gradients.dtype.itemsize > dtype.itemsize
