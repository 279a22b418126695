"""Tensors that are mapped from a file: nothing is copied, and what is not used is not read."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.load_tensors import read_tensor
from trainer_lib.tensor_files.safetensors import ALIGNMENT, TensorLocation

_POPULATE_READ = 22  # of Linux's madvise, from 5.14 on
_ALIGNED = (torch.float32, torch.float64, torch.complex64)


def map_or_read(path: Path, location: TensorLocation, is_read_now: bool = False) -> Tensor:
    """Return a tensor of a file: mapped if its values are used there as in memory, otherwise read.

    Products of matrices and vectors in fp32 are rounded differently if their memory is not aligned: results would
    depend on where weights are. In types of 16 bits they are not.

    Args:
        path: The file; see `map_tensor`.
        location: Where the tensor is in it.
        is_read_now: See `map_tensor`.
    """
    if location.start % (ALIGNMENT if location.dtype in _ALIGNED else location.dtype.itemsize):
        return read_tensor(path, *location)
    return map_tensor(path, *location, is_read_now=is_read_now)


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
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if is_read_now:
        with suppress(OSError, AttributeError):  # a hint: without it pages are read when they are used
            memory.madvise(_POPULATE_READ)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=before).reshape(tuple(shape))
