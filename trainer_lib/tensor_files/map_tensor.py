"""Tensors that are mapped from a file: nothing is copied, and what is not used is not read."""

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.load_tensors import read_tensor
from trainer_lib.tensor_files.reused_memory import ReusedMemory
from trainer_lib.tensor_files.safetensors import ALIGNMENT, TensorLocation

_POPULATE_READ = 22  # of Linux's madvise, from 5.14 on
_ALIGNED = (torch.float32, torch.float64, torch.complex64)


def map_or_read(
    path: Path, location: TensorLocation, is_read_now: bool = False, memory: ReusedMemory | None = None
) -> Tensor:
    """Return a tensor of a file: mapped if its values are used there as in memory, otherwise read.

    Products of matrices and vectors in fp32 are rounded differently if their memory is not aligned: results would
    depend on where weights are. In types of 16 bits they are not.

    Args:
        path: The file; see `map_tensor`.
        location: Where the tensor is in it.
        is_read_now: See `map_tensor`.
        memory: What gives memory to a tensor that is read.
    """
    if not _is_aligned(location):
        return read_tensor(path, *location, memory=memory)
    return map_tensor(path, *location, is_read_now=is_read_now)


def map_or_read_all(path: Path, locations: Mapping[str, TensorLocation]) -> dict[str, Tensor]:
    """Return tensors of a file by name, as `map_or_read` does, with one mapping for all of them."""
    mapped = {name: location for name, location in locations.items() if _size(location) and _is_aligned(location)}
    values = {name: read_tensor(path, *location) for name, location in locations.items() if name not in mapped}
    if mapped:
        memory = _map(path, max(location.start + _size(location) for location in mapped.values()), 0)
        values |= {name: _view(memory, *location) for name, location in mapped.items()}
    return values


def map_tensor(
    path: Path, dtype: torch.dtype, shape: Sequence[int], start: int = 0, is_read_now: bool = False
) -> Tensor:
    """Return a tensor whose memory is the file; writing to it changes a private copy.

    Args:
        path: The file, which may be replaced or deleted afterwards, but not cut.
        dtype: The type of the values.
        shape: The shape of the tensor.
        start: The byte of the file at which the values begin.
        is_read_now: Whether the pages are read now, in this thread; otherwise when they are used.

    Raises:
        CheckpointError: If the file cannot be read or is too short.
    """
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    before = start % mmap.ALLOCATIONGRANULARITY
    memory = _map(path, before + size, start - before)
    if is_read_now:
        with suppress(OSError, AttributeError):  # a hint: without it pages are read when they are used
            memory.madvise(_POPULATE_READ)
    return _view(memory, dtype, shape, before)


def _size(location: TensorLocation) -> int:
    return prod(location.shape) * location.dtype.itemsize


def _is_aligned(location: TensorLocation) -> bool:
    return location.start % (ALIGNMENT if location.dtype in _ALIGNED else location.dtype.itemsize) == 0


def _map(path: Path, size: int, start: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).reshape(tuple(shape))
