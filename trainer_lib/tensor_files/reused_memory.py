"""Memory for tensors that are read again and again: to get new memory takes longer than to read into it."""

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import finalize

import torch
from torch import Tensor


class ReusedMemory:
    """Gives memory to tensors, and to others of the same size once the first ones are gone.

    Example:
        >>> memory = ReusedMemory()
        >>> tensor = memory.take(torch.float32, (2, 3))
        >>> address = tensor.data_ptr()
        >>> del tensor
        >>> memory.take(torch.float32, (6,)).data_ptr() == address
        True
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a tensor, whose values are those of an earlier one or 0."""
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)  # which the tensor's storage refers to
        finalize(view, free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype).reshape(tuple(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy nothing: a copy has memory of its own."""
        return ReusedMemory, ()
