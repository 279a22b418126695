"""This file is a file of tensors read into host memory: whole, in pieces, several at once.

Each is read where it is to lie. To copy it out of a mapped file touches both page by page, and takes ten times as long.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.safetensors import read_places, with_aliases

_PIECE = 16 << 20  # bytes that one thread reads at a time
_THREADS = 4  # more do not make memory faster


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file of tensors into memory of their own, each under all its names.

    Raises:
        CheckpointError: If it is no such file, or not whole.
    """
    try:
        with safe_open(path, framework="pt") as file:  # which finds what there can be wrong with the header
            names = list(file.keys())
        places, metadata = read_places(path)
        tensors = {name: torch.empty(places[name].shape, dtype=places[name].dtype) for name in names}
        pieces = [piece for name in names for piece in _pieces(tensors[name], places[name].start)]
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_threads(len(pieces))) as pool:
            for _ in pool.map(lambda piece: _read(file.fileno(), *piece), pieces):
                continue
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    return with_aliases({name: tensor.to(device) for name, tensor in tensors.items()}, metadata)


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
