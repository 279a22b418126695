"""Reading a file of tensors into host memory, in pieces and in parallel.

Each piece is read directly into its tensor. Copying from a memory-mapped file takes ten times as long.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.reused_memory import ReusedMemory
from trainer_lib.tensor_files.safetensors import TensorLocation, read_locations, with_aliases

_PIECE = 16 << 20  # bytes that a thread reads at a time
_THREADS = 4  # more threads do not make memory faster


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file of tensors into new memory, each tensor under all its names.

    Raises:
        CheckpointError: If it is not a safetensors file, or is incomplete.
    """
    try:
        with safe_open(path, framework="pt") as file:  # checks the header
            names = list(file.keys())
        locations, metadata = read_locations(path)
        tensors = {name: torch.empty(locations[name].shape, dtype=locations[name].dtype) for name in names}
        pieces = [piece for name in names for piece in _pieces(tensors[name], locations[name].start)]
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_threads(len(pieces))) as pool:
            for _ in pool.map(lambda piece: _read(file.fileno(), *piece), pieces):
                continue
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    return with_aliases({name: tensor.to(device) for name, tensor in tensors.items()}, metadata)


def load_tensor(path: Path, name: str, device: str | torch.device = "cpu") -> Tensor:
    """Read one tensor of a safetensors file into new memory.

    Raises:
        CheckpointError: If the file or the tensor cannot be read.
    """
    return read_tensor(path, *locate_tensor(path, name)).to(device)


def locate_tensor(path: Path, name: str) -> TensorLocation:
    """Return where a tensor is in a safetensors file.

    Raises:
        CheckpointError: If the file cannot be read, or has no such tensor.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    locations, aliases = _locations(path, (state.st_mtime_ns, state.st_size, state.st_ino))
    location = locations.get(aliases.get(name, name))
    if location is None:
        raise CheckpointError(f"{path} has no tensor {name!r}.")
    return location


def read_tensor(
    path: Path, dtype: torch.dtype, shape: Sequence[int], start: int = 0, memory: ReusedMemory | None = None
) -> Tensor:
    """Read the values of a tensor, which lie in a file one after the other.

    Args:
        path: The file.
        dtype: The type of the values.
        shape: The shape of the tensor.
        start: The byte of the file at which they begin.
        memory: What gives the tensor its memory; by default it is new.

    Raises:
        CheckpointError: If the file cannot be read or is too short.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype) if memory is None else memory.take(dtype, shape)
    try:
        with path.open("rb", buffering=0) as file:
            for piece in _pieces(tensor, start):
                _read(file.fileno(), *piece)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensor


@lru_cache(maxsize=64)
def _locations(path: Path, state: tuple[int, ...]) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    del state  # the header of a file that was written again is read again
    locations, metadata = read_locations(path)
    return locations, {alias: name for alias, name in metadata.items() if name in locations}


def _pieces(tensor: Tensor, start: int) -> Iterator[tuple[memoryview, int]]:
    if tensor.numel():
        memory = tensor.reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(memory), _PIECE):
            yield memory[at : at + _PIECE], start + at


def _read(file: int, memory: memoryview, start: int) -> None:
    while len(memory):
        count = os.preadv(file, [memory], start)
        if not count:
            raise OSError("it ends before its last tensor")
        memory, start = memory[count:], start + count


def _threads(pieces: int) -> int:
    return max(1, min(pieces, len(os.sched_getaffinity(0)), _THREADS))
