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
        >>> memory = SnapshotMemory()
        >>> memory.allocate([24, 8])
        >>> [part.numel() for part in memory.take([24, 8])]
        [24, 8]
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(block.numel() for block in self._blocks)

    def allocate(self, sizes: Sequence[int], is_pinned: bool = False, is_needed: Callable[[], bool] = bool) -> None:
        """Allocate memory with all its pages, so that the first snapshot does not wait for them.

        Args:
            sizes: The bytes of the tensors.
            is_pinned: Whether it is page-locked, as asynchronous copies from an accelerator need it.
            is_needed: Whether the first snapshot is being taken, which makes the rest of the pages beside training.
                By default it never is.
        """
        size = sum(map(_padded, sizes))
        block = _block(size, is_pinned)
        self._blocks = [block]
        pages = block.numpy()
        for start in range(0, 0 if is_pinned else size, _PIECE):
            if is_needed():
                return
            pages[start : start + _PIECE : mmap.PAGESIZE] = 0

    def take(self, sizes: Sequence[int], is_pinned: bool = False) -> list[Tensor]:
        """Return memory for tensors of these sizes in bytes; it is that of the last call."""
        padded = list(map(_padded, sizes))
        if not any(padded):
            return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        starts, rest = self._starts(padded)
        if rest and len(self._blocks) > 1:
            self._blocks = []  # free the old memory before allocating the new
            starts, rest = self._starts(padded)
        if rest:
            self._blocks.append(_block(rest, is_pinned))
            starts, rest = self._starts(padded)
        return [self._blocks[index][at : at + size] for (index, at), size in zip(starts, sizes, strict=True)]

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


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


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
