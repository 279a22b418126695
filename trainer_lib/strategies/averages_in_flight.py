"""Averages over the ranks of a few values, reduced while a backward runs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.process_group import ProcessGroup


class AveragesInFlight:
    """One all-reduce at a time, whose result is collected later.

    Args:
        group: The ranks.
        device: The device of this rank.
        dtype: The type in which values are exchanged.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._group, self._device, self._dtype = group, device, dtype
        self._sent: tuple[Tensor, dist.Work] | None = None

    def begin(self, values: Sequence[float | Tensor]) -> None:
        """Start to average values over the ranks; the values before, if nobody collected them, are dropped."""
        if self._sent is not None:
            self._sent[1].wait()
            self._sent = None
        if values:
            tensor = torch.stack([self._on_device(value) for value in values])
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            self._sent = tensor, work

    def averages(self) -> Sequence[float | Tensor]:
        """Return the averages, once the all-reduce is complete."""
        if self._sent is None:
            return ()
        (tensor, work), self._sent = self._sent, None
        work.wait()
        return list(tensor / self._group.size)

    def _on_device(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device, self._dtype, non_blocking=True)
        return torch.full((), value, dtype=self._dtype, device=self._device)
