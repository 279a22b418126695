"""Reading a file of tensors into host memory, in pieces and in parallel.

Each piece is read directly into its tensor. Copying from a memory-mapped file takes ten times as long.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.tensor_files.reused_memory import ReusedMemory
from trainer_lib.tensor_files.safetensors import TensorLocation, read_locations, with_aliases

_PIECE = 16 << 20  # bytes that a thread reads at a time
_MOST_MEMORIES = 512  # of a read; the system takes 1024
_THREADS = 4  # more threads do not make memory faster


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file of tensors into new memory, each tensor under all its names.

    Raises:
        CheckpointError: If it is not a safetensors file, or is incomplete.
    """
    tensors, metadata, reads = _planned(path)
    with _errors_named(path):
        for _ in _read_all(path, reads, _threads(len(reads))):
            continue
    return with_aliases({name: tensor.to(device) for name, tensor in tensors.items()}, metadata)


def load_with_checksum(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read a file of tensors as `load_tensors` does, and return its checksum too, of the bytes that were read.

    Raises:
        CheckpointError: If it is not a safetensors file, or is incomplete.
    """
    tensors, metadata, reads = _planned(path)
    checksum = xxh3_128()
    with _errors_named(path):
        with path.open("rb") as file:
            header = file.read(reads[0].start if reads else -1)
        checksum.update(header)
        for read in _read_all(path, reads, threads=1):  # beside other files; the disk reads ahead of one thread only
            for memory in read.memories:
                checksum.update(memory)
    return with_aliases(tensors, metadata), checksum.hexdigest()


def load_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file into new memory.

    Raises:
        CheckpointError: If the file or the tensor cannot be read.
    """
    return read_tensor(path, *locate_tensor(path, name))


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
            for piece, at in _pieces(tensor, start):
                _read(file.fileno(), [piece], at)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensor


@lru_cache(maxsize=64)
def _locations(path: Path, state: tuple[int, ...]) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    del state  # the header of a file that was written again is read again
    locations, metadata = read_locations(path)
    return locations, {alias: name for alias, name in metadata.items() if name in locations}


class _Read(NamedTuple):
    """Consecutive bytes of a file that are read at a time.

    Args:
        memories: What they are read into.
        start: The offset of the first byte.
    """

    memories: list[memoryview]
    start: int


def _planned(path: Path) -> tuple[dict[str, Tensor], dict[str, str], list[_Read]]:
    """Return new tensors for those in a file, its metadata, and the reads that fill them, in the order of the file."""
    locations, metadata = read_locations(path)
    tensors = {name: torch.empty(location.shape, dtype=location.dtype) for name, location in locations.items()}
    reads: list[_Read] = []
    filled = _PIECE
    for name in sorted(locations, key=lambda name: locations[name].start):
        for memory, start in _pieces(tensors[name], locations[name].start):
            if filled + len(memory) > _PIECE or len(reads[-1].memories) == _MOST_MEMORIES:
                reads.append(_Read([], start))
                filled = 0
            reads[-1].memories.append(memory)
            filled += len(memory)
    return tensors, metadata, reads


def _read_all(path: Path, reads: list[_Read], threads: int) -> Iterator[_Read]:
    """Read on threads, and yield the reads in their order, each when it is complete."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:

        def read_one(read: _Read) -> _Read:
            _read(file.fileno(), read.memories, read.start)
            return read

        yield from pool.map(read_one, reads)


def _pieces(tensor: Tensor, start: int) -> Iterator[tuple[memoryview, int]]:
    if tensor.numel():
        memory = as_bytes(tensor).numpy().data
        for at in range(0, len(memory), _PIECE):
            yield memory[at : at + _PIECE], start + at


def _read(file: int, memories: Sequence[memoryview], start: int) -> None:
    rest = list(memories)
    while rest:
        count = os.preadv(file, rest, start)
        if not count:
            raise OSError("it ends before its last tensor")
        start += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]


@contextmanager
def _errors_named(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _threads(pieces: int) -> int:
    return max(1, min(pieces, len(os.sched_getaffinity(0)), _THREADS))
