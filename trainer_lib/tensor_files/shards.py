"""This file is tensors of which each process wrote its part: one file a process, in a folder, and any region read back.

The files are those of torch's own distributed checkpoints in safetensors (its HuggingFaceStorageReader reads them).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer_lib.filesystem.atomic_files import inside
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.file_contents import Tensors
from trainer_lib.tensor_files.safetensors import read_header

SHARDS_ENDING = ".shards"  # of the folder
_METADATA_NAME = "DCP_SHARDING_INFO"
_OFFSETS_NAME = "saved_offsets"


class Chunk(NamedTuple):
    """A part of a tensor.

    Args:
        values: The part.
        offsets: Where in the whole it begins.
    """

    values: Tensor
    offsets: Sequence[int]


class _Saved(NamedTuple):
    path: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def shard_file(rank: int) -> str:
    """Return the name of the file of a process."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def shard_content(chunks: Mapping[str, Chunk]) -> Tensors:
    """Return what the file of a process is to hold."""
    offsets = {name: {_OFFSETS_NAME: list(chunk.offsets)} for name, chunk in chunks.items()}
    values = {name: chunk.values for name, chunk in chunks.items()}
    return Tensors(values, {_METADATA_NAME: json.dumps(offsets)})


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in the files of several processes.

    Args:
        name: Its name.
        dtype: Its type.
        shape: Its whole shape.
        chunks: Where its parts are.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[_Saved, ...]

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a region of the tensor, or all of it.

        Raises:
            CheckpointError: If the files do not hold all of it.
        """
        offsets = [0] * len(self.shape) if offsets is None else offsets
        sizes = self.shape if sizes is None else sizes
        held = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if math.prod(sizes) > held:  # else as much memory is taken as a file says
            raise self._incomplete(held, math.prod(sizes))
        region = torch.empty(tuple(sizes), dtype=self.dtype)
        filled = 0
        for chunk in self.chunks:
            starts = [max(own, its) for own, its in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(own + size, its + its_size)
                for own, size, its, its_size in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                region[_slices(starts, ends, offsets)] = self._part(chunk, _slices(starts, ends, chunk.offsets))
                filled += math.prod(end - start for start, end in zip(starts, ends, strict=True))
        if filled != region.numel():
            raise self._incomplete(filled, region.numel())
        return region

    def _incomplete(self, held: int, wanted: int) -> CheckpointError:
        return CheckpointError(
            f"Of {self.name!r}, the files in {self.chunks[0].path.parent} hold {held} of {wanted} values."
        )

    def _part(self, chunk: _Saved, slices: tuple[slice, ...]) -> Tensor:
        try:
            with safe_open(chunk.path, framework="pt") as file:
                return file.get_slice(self.name)[slices] if slices else file.get_tensor(self.name)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{chunk.path} cannot be read as safetensors: {error}") from error


def read_shards(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in the files of a folder by name, without reading their values.

    Raises:
        CheckpointError: If one is no such file.
    """
    inside(folder.parent, folder.name, f"{folder.parent}")
    found: dict[str, list[_Saved]] = {}
    types: dict[str, torch.dtype] = {}
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes, metadata = read_header(path)
        offsets = _offsets(path, metadata)
        for name, (dtype, shape) in shapes.items():
            types[name] = dtype
            start = offsets.get(name, (0,) * len(shape))
            if len(start) != len(shape):
                raise CheckpointError(f"{path} is damaged: {name!r} of {len(shape)} dimensions begins at {start}.")
            found.setdefault(name, []).append(_Saved(path, start, tuple(shape)))
        names |= {alias: first for alias, first in metadata.items() if first in shapes}
    tensors = {
        name: SavedTensor(name, types[name], _whole_shape(chunks), tuple(chunks)) for name, chunks in found.items()
    }
    return {**tensors, **{alias: tensors[first] for alias, first in names.items()}}


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Read all tensors in the files of a folder, whole."""
    read: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, saved in read_shards(folder).items():
        if saved.name not in read:
            read[saved.name] = saved.read()
        tensors[name] = read[saved.name]
    return tensors


def _offsets(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        told: dict[str, Any] = read_json(metadata.get(_METADATA_NAME, "{}"))
        offsets = {name: tuple(int(start) for start in one[_OFFSETS_NAME]) for name, one in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}.") from error
    return offsets


def _whole_shape(chunks: Sequence[_Saved]) -> torch.Size:
    ends = [[start + size for start, size in zip(one.offsets, one.sizes, strict=True)] for one in chunks]
    return torch.Size([max(sizes) for sizes in zip(*ends, strict=True)])


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(starts, ends, origin, strict=True))
