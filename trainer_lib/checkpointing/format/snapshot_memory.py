"""Host memory for snapshots: allocated ahead of the first one, and reused by all."""

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNMENT = 64
_PIECE = 16 << 20  # bytes whose pages are touched at a time
_WIPE_ON_FORK = 18  # Linux's MADV_WIPEONFORK, which Python has no name for


class SnapshotMemory:
    """Gives memory to the tensors of one snapshot at a time.

    Example:
        >>> weights = [torch.ones(2, 3), torch.ones(4)]
        >>> memory = SnapshotMemory()
        >>> memory.allocate(weights)
        >>> [part.shape for part in memory.take(weights)]
        [torch.Size([2, 3]), torch.Size([4])]
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(block.numel() for block in self._blocks)

    def allocate(
        self, tensors: Sequence[Tensor], is_pinned: bool = False, is_needed: Callable[[], bool] = bool
    ) -> None:
        """Allocate memory with all its pages, so that the first snapshot does not wait for them.

        Args:
            tensors: What the first snapshot copies.
            is_pinned: Whether it is page-locked, as asynchronous copies from an accelerator need it.
            is_needed: Whether the first snapshot is being taken, which makes the rest of the pages beside training.
                By default it never is.
        """
        size = sum(map(_padded_size, tensors))
        block = _block(size, is_pinned)
        self._blocks = [block]
        pages = block.numpy()
        for start in range(0, 0 if is_pinned else size, _PIECE):
            if is_needed():
                return
            pages[start : start + _PIECE : mmap.PAGESIZE] = 0

    def take(self, tensors: Sequence[Tensor], is_pinned: bool = False) -> list[Tensor]:
        """Return memory for contiguous copies of these tensors; it is that of the last call."""
        sizes = list(map(_padded_size, tensors))
        starts, rest = self._starts(sizes)
        if rest and len(self._blocks) > 1:
            self._blocks = []  # free the old memory before allocating the new
            starts, rest = self._starts(sizes)
        if rest or not self._blocks:
            self._blocks.append(_block(rest, is_pinned))
            starts, rest = self._starts(sizes)
        views = {dtype: [block.view(dtype) for block in self._blocks] for dtype in {tensor.dtype for tensor in tensors}}
        return [
            # One operation: a slice that is viewed twice takes three times as long, and there may be thousands.
            views[tensor.dtype][index].as_strided(tensor.shape, _contiguous_strides(tensor), at // tensor.itemsize)
            for tensor, (index, at) in zip(tensors, starts, strict=True)
        ]

    def _starts(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
        """Return the block and the offset of each tensor that fits, and the bytes of those that do not."""
        starts: list[tuple[int, int]] = []
        index = at = 0
        for number, size in enumerate(sizes):
            while index < len(self._blocks) and at + size > self._blocks[index].numel():
                index, at = index + 1, 0
            if index == len(self._blocks):
                return starts, sum(sizes[number:])
            starts.append((index, at))
            at += size
        return starts, 0


def _padded_size(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT


def _contiguous_strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.is_contiguous() else torch.empty(tensor.shape, device="meta").stride()


def _block(size: int, is_pinned: bool) -> Tensor:
    if is_pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Huge pages are not asked for. They save half of the first write, and nothing later; in a virtual machine that
    # returns free ones to its host, the first write to them takes five times as long.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":  # while a loader's workers live, each first write to a page would copy it
        with suppress(OSError):
            memory.madvise(_WIPE_ON_FORK)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
