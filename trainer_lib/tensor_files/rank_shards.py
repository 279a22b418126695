"""Sharded tensors: each rank writes one file of its shards to a folder, and any region can be read back.

The files have the format of torch.distributed.checkpoint in safetensors (its HuggingFaceStorageReader reads them).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer_lib.filesystem.atomic_files import path_inside
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.tensor_files.file_contents import Tensors
from trainer_lib.tensor_files.safetensors import open_safetensors, read_header

SHARDS_ENDING = ".shards"  # of the folder
_METADATA_NAME = "DCP_SHARDING_INFO"
_OFFSETS_NAME = "saved_offsets"


class Chunk(NamedTuple):
    """A shard of a tensor.

    Args:
        values: The shard.
        offsets: Where it begins in the whole tensor.
    """

    values: Tensor
    offsets: Sequence[int]


class _Saved(NamedTuple):
    path: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def shard_file(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def shard_content(chunks: Mapping[str, Chunk]) -> Tensors:
    """Return the contents of the file of a rank."""
    offsets = {name: {_OFFSETS_NAME: list(chunk.offsets)} for name, chunk in chunks.items()}
    values = {name: chunk.values for name, chunk in chunks.items()}
    return Tensors(values, {_METADATA_NAME: json.dumps(offsets)})


@frozen_dataclass
class SavedTensor:
    """A tensor in the files of several ranks.

    Args:
        name: Its name.
        dtype: Its dtype.
        shape: The shape of the whole tensor.
        chunks: The locations of its shards.
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
        saved = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if math.prod(sizes) > saved:  # do not allocate as much memory as a damaged file asks for
            raise self._incomplete(saved, math.prod(sizes))
        region = torch.empty(tuple(sizes), dtype=self.dtype)
        filled = 0
        for chunk in self.chunks:
            starts = [max(offset, chunk_offset) for offset, chunk_offset in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(offset + size, chunk_offset + chunk_size)
                for offset, size, chunk_offset, chunk_size in zip(
                    offsets, sizes, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                region[_slices(starts, ends, offsets)] = self._part(chunk, _slices(starts, ends, chunk.offsets))
                filled += math.prod(end - start for start, end in zip(starts, ends, strict=True))
        if filled != region.numel():
            raise self._incomplete(filled, region.numel())
        return region

    def _incomplete(self, saved: int, needed: int) -> CheckpointError:
        return CheckpointError(
            f"{self.name!r} is incomplete: the files in {self.chunks[0].path.parent} hold {saved} of {needed} values."
        )

    def _part(self, chunk: _Saved, slices: tuple[slice, ...]) -> Tensor:
        try:
            with open_safetensors(chunk.path) as file:
                return file.get_slice(self.name)[slices] if slices else file.get_tensor(self.name)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{chunk.path} cannot be read as safetensors: {error}") from error


def read_shards(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in the files of a folder by name, without reading their values.

    Raises:
        CheckpointError: If a file is not a safetensors file.
    """
    path_inside(folder.parent, folder.name, f"{folder.parent}")
    chunks: dict[str, list[_Saved]] = {}
    types: dict[str, torch.dtype] = {}
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes, metadata = read_header(path)
        offsets = _offsets(path, metadata)
        for name, (dtype, shape) in shapes.items():
            types[name] = dtype
            start = offsets.get(name, (0,) * len(shape))
            if len(start) != len(shape):
                raise CheckpointError(f"{path} is damaged: {name!r} has {len(shape)} dimensions and begins at {start}.")
            chunks.setdefault(name, []).append(_Saved(path, start, tuple(shape)))
        names |= {alias: first for alias, first in metadata.items() if first in shapes}
    tensors = {
        name: SavedTensor(name, types[name], _whole_shape(parts), tuple(parts)) for name, parts in chunks.items()
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
        entries: dict[str, Any] = read_json(metadata.get(_METADATA_NAME, "{}"))
        offsets = {name: tuple(int(start) for start in entry[_OFFSETS_NAME]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}.") from error
    return offsets


def _whole_shape(chunks: Sequence[_Saved]) -> torch.Size:
    ends = [[start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
    return torch.Size([max(sizes) for sizes in zip(*ends, strict=True)])


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(starts, ends, origin, strict=True))
