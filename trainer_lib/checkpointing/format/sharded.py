"""This file is the states of sharded models and optimizers: each process writes its shards, and reads what it needs.

What is read need not be cut as it was when it was written: each process takes its regions from whichever files have
them. torch's own distributed checkpoints were tried here first; they refuse tied weights, know no plain values, and
bring a commit and errors of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.checkpointing.format.state_parts import State, StateOptions, Weights, state_files
from trainer_lib.tensor_files.file_contents import Content, Json
from trainer_lib.tensor_files.shards import (
    SHARDS_ENDING,
    Chunk,
    SavedTensor,
    read_shards,
    shard_content,
    shard_file,
)


@dataclass(frozen=True, kw_only=True)
class ShardedWeights(Weights):
    """A sharded model.

    Args:
        rank: The number of this process.
        targets: Gives the model's shards by name, which those that are read are made like.
    """

    rank: int
    targets: Callable[[], Mapping[str, Tensor]]

    def files(self, state: Mapping[str, Any], options: StateOptions) -> dict[str, Content]:
        """Return this process's file of shards, and the main one's of extra state if there is any."""
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        files = shard_files(self.name, tensors, self.rank)
        return files | (state_files(self.extra_name, extra, options) if extra and self.writes else {})

    def read(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Return this process's shards; the whole weights of a state that was saved so."""
        if not (folder / f"{self.name}{SHARDS_ENDING}").is_dir():
            return super().read(folder, options)
        targets = self.targets()
        made: dict[str, Any] = {}
        made_of: dict[tuple[str, int], Tensor] = {}
        for name, saved in read_shards(folder / f"{self.name}{SHARDS_ENDING}").items():
            target = targets.get(name)
            if target is None or target.shape != saved.shape:
                # Nothing to fill; who loads it will tell by name and shape.
                made[name] = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
            else:
                key = (saved.name, id(target))
                made[name] = made_of[key] if key in made_of else made_of.setdefault(key, filled_like(target, saved))
        return made | self.read_extra(folder, options)


@dataclass(frozen=True, kw_only=True)
class ShardedOptimizer(State):
    """The optimizer of a sharded model.

    Args:
        rank: The number of this process.
        targets: Gives the parameters by name, which shards of their state are made like.
    """

    rank: int
    targets: Callable[[], Mapping[str, Tensor]]

    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return this process's file of shards, and the main one's of everything else."""
        encoded = encode(state, options.allow_pickle, f"the state of {self.name}", shards=True)
        files = shard_files(self.name, encoded.tensors, self.rank)
        return files | ({f"{self.name}.json": Json(encoded.tree)} if self.writes else {})

    def read(self, folder: Path, options: StateOptions) -> Any:
        """Return this process's shards; the whole state of one that was saved so."""
        shards = folder / f"{self.name}{SHARDS_ENDING}"
        if not shards.is_dir():
            return super().read(folder, options)
        tree = Json.read(folder / f"{self.name}.json")
        encoded = Encoded(tree, read_shards(shards))
        state = decode(encoded, options.allow_pickle, f"the state of {self.name}")
        targets = self.targets()
        state["state"] = {
            name: {key: _made(value, targets.get(name)) for key, value in values.items()}
            if isinstance(values, dict)
            else values
            for name, values in state["state"].items()
        }
        return state


def shard_files(name: str, tensors: Mapping[str, Any], rank: int) -> dict[str, Content]:
    """Return the file of this process's parts of tensors."""
    chunks = {key: chunk for key, value in tensors.items() if (chunk := _chunk(value, rank)) is not None}
    return {f"{name}{SHARDS_ENDING}/{shard_file(rank)}": shard_content(chunks)}


def filled_like(target: Any, saved: SavedTensor) -> Tensor:
    """Return a tensor that is sharded like `target`, with the values that were saved."""
    if not hasattr(target, "_local_tensor"):
        return saved.read().to(target.device)
    made: Any = torch.empty_like(target, dtype=saved.dtype, requires_grad=False)
    sizes, offsets = _region(target)
    if made._local_tensor.numel():
        made._local_tensor.copy_(saved.read(offsets, sizes))
    return made


def _made(value: Any, parameter: Any) -> Any:
    if not isinstance(value, SavedTensor):
        return value
    if parameter is None or not hasattr(parameter, "_local_tensor") or not value.shape:
        return value.read()
    if value.shape == parameter.shape:
        return filled_like(parameter, value)
    # Of another shape, such as the rows and columns that some optimizers keep: whole on each process.
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = value.read().to(parameter._local_tensor.device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _chunk(value: Any, rank: int) -> Chunk | None:
    """Return what this process writes of a tensor; `None` if that is nothing."""
    if not hasattr(value, "_local_tensor"):
        return Chunk(value, [0] * value.dim()) if rank == 0 else None
    coordinates = value.device_mesh.get_coordinate()
    # Of several copies the first.
    if any(at and placement.is_replicate() for at, placement in zip(coordinates, value.placements, strict=True)):
        return None
    local = value._local_tensor.detach()
    return Chunk(local, _region(value)[1]) if local.numel() else None


def _region(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets of this process's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
