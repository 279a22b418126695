"""Communication hooks that compress DDP's gradient buckets: 16-bit casts and PowerSGD."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from trainer_lib.options.enums import DDPCommunicationHookType as Kind
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs

# Averages a bucket of gradients over the ranks.
CommHook = Callable[[dist.GradBucket], Future[Tensor]]

_CASTS: dict[str, torch.dtype] = {Kind.FP16: torch.float16, Kind.BF16: torch.bfloat16}
# PowerSGD divides each column by its length; this is added to the divisor, so that a column of zeros stays finite.
_EPSILON, _EPSILON_OF_FP16 = 1e-30, 1e-7


def averaged(bucket: dist.GradBucket) -> Future[Tensor]:
    """Average the gradients without compression."""
    return summed(bucket.buffer()).then(lambda future: future.value()[0].div_(dist.get_world_size()))


def new_hook(options: DistributedDataParallelKwargs | None) -> CommHook:
    """Return a hook that the options ask for; each model needs its own one."""
    if options is None:
        return averaged
    hook, cast, arguments = options.comm_hook, _CASTS.get(options.comm_wrapper), options.comm_state_option
    if hook in (Kind.POWER_SGD, Kind.BATCHED_POWER_SGD):
        return PowerSGD(arguments, cast, batched=hook == Kind.BATCHED_POWER_SGD)
    cast = _CASTS.get(hook, cast)
    return averaged if cast is None else Cast(cast)


def summed(tensor: Tensor) -> Future[list[Tensor]]:
    """Start an in-place all-reduce that adds up the tensors of all ranks."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


class Cast:
    """Reduce gradients in 16 bits, on any backend (torch's own hook for bf16 works with NCCL only).

    Args:
        dtype: The type to reduce in; gradients that are no larger keep their type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        if not _shrinks(gradients, self._dtype):
            return averaged(bucket)
        # Divide before the cast: the sum over many ranks would exceed the range of fp16.
        sent = gradients.div_(dist.get_world_size()).to(self._dtype)
        return summed(sent).then(lambda future: gradients.copy_(future.value()[0]))


class PowerSGD:
    """Reduce two low-rank factors of each gradient matrix, with torch's PowerSGD.

    Args:
        arguments: Arguments of `PowerSGDState`.
        dtype: The type of the factors on the wire.
        batched: Treat a whole bucket as one square matrix.
    """

    def __init__(self, arguments: dict[str, Any], dtype: torch.dtype | None = None, batched: bool = False) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        epsilon = _EPSILON_OF_FP16 if dtype is torch.float16 else _EPSILON
        defaults: dict[str, Any] = {"orthogonalization_epsilon": epsilon}
        self._state = powerSGD_hook.PowerSGDState(None, **{**defaults, **arguments})
        self._hook: Callable[[Any, Any], Future[Tensor]] = powerSGD_hook.powerSGD_hook
        self._dtype, self._batched = dtype, batched

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        if gradients.is_sparse:
            self._state.maybe_increase_iter(bucket)
            return averaged(bucket)
        if self._dtype is not None and _shrinks(gradients, self._dtype):
            bucket.set_buffer(gradients.to(self._dtype))
        future = self._hook(self._state, (_Square if self._batched else _Matrices)(bucket))
        if gradients.device.type == "cpu":
            # Each bucket needs several all-reduces, the later ones started from gloo's threads. With two buckets in
            # flight, ranks would start them in different orders.
            future.wait()
        return future.then(lambda done: gradients.copy_(done.value()[: gradients.numel()]))


class _Matrices:
    """A bucket whose gradients all have at least one dimension, as torch's PowerSGD requires."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        self._buffer = bucket.buffer()
        self._gradients = [torch.atleast_1d(gradient) for gradient in bucket.gradients() if gradient.numel()]
        self.index, self.is_last = bucket.index, bucket.is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients


class _Square(_Matrices):
    """A bucket as one square matrix, padded with zeros (torch's own batched hook fails on its first check)."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        super().__init__(bucket)
        gradients = bucket.buffer()
        side = math.ceil(math.sqrt(gradients.numel()))
        self._buffer = gradients.new_zeros(side * side)
        self._buffer[: gradients.numel()] = gradients
        self._gradients = [self._buffer.view(side, side)]


def _shrinks(gradients: Tensor, dtype: torch.dtype) -> bool:
    return not gradients.is_sparse and gradients.dtype.itemsize > dtype.itemsize
