"""A bucket of gradients and a few values, averaged over the ranks in one all-reduce."""

from array import array
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from trainer_lib.strategies.ddp.comm_hooks import summed

Values = Sequence[float | Tensor] | Tensor

# Sums in these types are exact enough for counts of items; smaller types would round them.
EXACT: dict[torch.dtype, Literal["f", "d"]] = {torch.float32: "f", torch.float64: "d"}


class HostMessage:
    """A message in host memory, which each update uses again.

    Args:
        gradients: A bucket of gradients, of a type in `EXACT`.
        count: The number of values.
        size: The world size.
    """

    def __init__(self, gradients: Tensor, count: int, size: int) -> None:
        self._length, self._dtype, self._count = gradients.numel(), gradients.dtype, count
        # Python reads and writes the values in the memory of the tensor: as tensors they would take five operations.
        self._memory: array[float] = array(EXACT[self._dtype], bytes((self._length + count) * self._dtype.itemsize))
        self._message = torch.frombuffer(self._memory, dtype=self._dtype)
        self._averages = self._message[: self._length]
        self._size, self._divisor = size, torch.tensor(float(size), dtype=self._dtype)  # a number would take longer
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD  # asked directly: `dist.all_reduce` makes eleven more calls
        self._finished: Future[Tensor] = Future()
        self._finished.set_result(self._averages)

    def fits(self, gradients: Tensor, values: Values) -> bool:
        """Whether this message has the type and length for a bucket and its values."""
        return (gradients.numel(), gradients.dtype, len(values)) == (self._length, self._dtype, self._count)

    def reduce(self, gradients: Tensor, values: Values, is_last: bool) -> Future[Tensor]:
        """Send what this rank contributes, and return the averages of the gradients."""
        torch.div(gradients, self._divisor, out=self._averages)
        self._memory[self._length :] = array(EXACT[self._dtype], map(float, values))
        if not is_last:
            return summed(self._message).then(self._arrived)
        # After the last bucket there is nothing to overlap with, and a callback on another thread would take longer.
        self._group.allreduce([self._message]).wait()
        return self._finished

    def values(self) -> list[float]:
        """Return the averages of the values, after the backward."""
        return [total / self._size for total in self._memory[self._length :]]

    def _arrived(self, future: Future[list[Tensor]]) -> Tensor:
        future.value()  # raises what the all-reduce raised
        return self._averages


class DeviceMessage:
    """A message in the memory of an accelerator, for which nothing waits."""

    def __init__(self, size: int) -> None:
        self._size, self._values = size, torch.empty(0)

    def reduce(self, gradients: Tensor, values: Tensor) -> Future[Tensor]:
        """Send what this rank contributes, and return the averages of the gradients."""
        length = gradients.numel()

        def split(future: Future[list[Tensor]]) -> Tensor:
            averages = future.value()[0].div_(self._size)
            self._values = averages[length:]
            return averages[:length]

        return summed(torch.cat([gradients, values.to(gradients)])).then(split)

    def values(self) -> list[Tensor]:
        """Return the averages of the values, after the backward; reading them waits for the accelerator."""
        return list(self._values)
