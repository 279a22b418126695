"""How a rank gets the keys and values of the others, and how their gradients get back: around a ring, or gathered."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Gradients(Protocol):
    """Sums the gradients of keys and values, each on the rank that they belong to."""

    def add(self, source: int, gradients: list[Tensor]) -> None:
        """Add the gradients of what rank `source` holds. All ranks call it once for each rank of the group."""
        ...

    def total(self) -> list[Tensor]:
        """Return the gradients of what this rank holds, from all ranks."""
        ...


class Exchange(Protocol):
    """Shows each rank the tensors of all."""

    def tensors_of_all(self, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank of the group, beginning anywhere, with its tensors."""
        ...

    def gradients(self, tensors: list[Tensor]) -> Gradients:
        """Return the sums of the gradients of `tensors`, in the order of `tensors_of_all`."""
        ...


class Ring:
    """Each rank passes what it has to the next one, while it computes: one rank's keys and values at a time.

    Args:
        group: The ranks of the ring.
    """

    group: Any
    rank: int
    size: int

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def tensors_of_all(self, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield this rank and its tensors, then those before it."""
        for turn in range(self.size):
            is_last = turn == self.size - 1
            arriving, works = ([], []) if is_last else self._start(tensors)
            yield (self.rank - turn) % self.size, tensors
            for work in works:
                work.wait()
            tensors = arriving

    def gradients(self, tensors: list[Tensor]) -> "RingGradients":
        """Return sums that travel with the tensors."""
        return RingGradients(self, tensors)

    def passed_on(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the rank before, and send these to the next."""
        arriving, works = self._start(tensors)
        for work in works:
            work.wait()
        return arriving

    def _start(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        tensors = [tensor.contiguous() for tensor in tensors]
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor, self._next, self.group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, self._previous, self.group) for tensor in arriving]
        return arriving, dist.batch_isend_irecv([*sends, *receives])


class RingGradients:
    """Sums of gradients that travel one rank on after each addition, and are home after the last."""

    def __init__(self, ring: Ring, tensors: list[Tensor]) -> None:
        self._ring, self._sums = ring, _zeros(tensors)

    def add(self, source: int, gradients: list[Tensor]) -> None:
        """Add the gradients, and pass the sums on."""
        del source
        for total, gradient in zip(self._sums, gradients, strict=True):
            total += gradient
        self._sums = self._ring.passed_on(self._sums)

    def total(self) -> list[Tensor]:
        """Return the sums."""
        return self._sums


class AllGather:
    """Each rank gets the keys and values of all at once: one message, and the memory of whole sequences for them.

    Args:
        group: The ranks of the group.
    """

    group: Any
    rank: int
    size: int

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def tensors_of_all(self, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the ranks in order."""
        if is_alike(tensors):
            yield from enumerate(list(parts.unbind()) for parts in all_gather(torch.stack(tensors), self.group))
        else:
            gathered = [all_gather(tensor, self.group) for tensor in tensors]
            yield from enumerate(map(list, zip(*gathered, strict=True)))

    def gradients(self, tensors: list[Tensor]) -> "GatheredGradients":
        """Return sums that are exchanged at the end."""
        return GatheredGradients(self.group, tensors)


class GatheredGradients:
    """Gradients for all ranks, which are summed where they belong in one message."""

    def __init__(self, group: Any, tensors: list[Tensor]) -> None:
        self._group = group
        self._sums = [_zeros(tensors) for _ in range(dist.get_world_size(group))]

    def add(self, source: int, gradients: list[Tensor]) -> None:
        """Keep the gradients for their rank."""
        for total, gradient in zip(self._sums[source], gradients, strict=True):
            total += gradient

    def total(self) -> list[Tensor]:
        """Exchange the sums."""
        if is_alike(self._sums[0]):
            return list(self._reduced([torch.stack(sums) for sums in self._sums]).unbind())
        return [self._reduced(list(sums)) for sums in zip(*self._sums, strict=True)]

    def _reduced(self, sums: list[Tensor]) -> Tensor:
        total = torch.empty_like(sums[0])
        dist.reduce_scatter(total, sums, group=self._group)
        return total


def is_alike(tensors: list[Tensor]) -> bool:
    """Whether tensors have one shape and type, so that they fit one message."""
    return len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1


def all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which have the same shape."""
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _zeros(tensors: list[Tensor]) -> list[Tensor]:
    """Return sums of at least single precision."""
    return [
        torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
        for tensor in tensors
    ]
