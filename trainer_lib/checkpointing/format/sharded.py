"""The states of sharded models and optimizers: each rank writes its shards, and reads the regions that it needs.

The world that loads may shard differently from the world that saved: each rank reads its regions from the files that
have them. torch.distributed.checkpoint was tried first: it refuses tied weights, has no plain values, and has a commit
and errors of its own.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.checkpointing.format.state_parts import State, StateOptions, Weights, state_files
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.local_shards import local_shard
from trainer_lib.tensor_files.file_contents import Content, Json
from trainer_lib.tensor_files.quantized_states import QuantizedState
from trainer_lib.tensor_files.rank_shards import (
    SHARDS_ENDING,
    Chunk,
    SavedTensor,
    read_shards,
    shard_content,
    shard_file,
)

_Region = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and offsets


@frozen_dataclass(kw_only=True)
class ShardedWeights(Weights):
    """A sharded model.

    Args:
        rank: The rank that writes and reads.
        targets: Returns the model's shards by name. Tensors that are read get the same sharding.
    """

    rank: int
    targets: Callable[[], Mapping[str, Tensor]]

    def files(self, state: Mapping[str, Any], options: StateOptions) -> dict[str, Content]:
        """Return this rank's file of shards; on the main rank also the extra state, if there is any."""
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        files = shard_files(self.name, tensors, self.rank)
        return files | (state_files(self.extra_name, extra, options) if extra and self.writes else {})

    def read(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Return this rank's shards, or the whole weights if the checkpoint was not sharded."""
        if not (folder / f"{self.name}{SHARDS_ENDING}").is_dir():
            return super().read(folder, options)
        targets = self.targets()
        shards: dict[str, Any] = {}
        by_target: dict[tuple[str, int], Tensor] = {}
        for name, saved in read_shards(folder / f"{self.name}{SHARDS_ENDING}").items():
            target = targets.get(name)
            if target is None or target.shape != saved.shape:
                # It fits no parameter: loading it into the model raises with the name and the shape.
                shards[name] = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
            else:
                key = (saved.name, id(target))
                if key not in by_target:
                    by_target[key] = filled_like(target, saved)
                shards[name] = by_target[key]
        return shards | self.read_extra(folder, options)


@frozen_dataclass(kw_only=True)
class ShardedOptimizer(State):
    """The optimizer of a sharded model.

    Args:
        rank: The rank that writes and reads.
        targets: Returns the parameters by name. Their optimizer state gets the same sharding.
    """

    rank: int
    targets: Callable[[], Mapping[str, Tensor]]

    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return this rank's file of shards; on the main rank also the values that are not tensors."""
        encoded = encode(state, options.allow_pickle, f"the state of {self.name}", shards=True)
        files = shard_files(self.name, encoded.tensors, self.rank)
        return files | ({f"{self.name}.json": Json(encoded.tree)} if self.writes else {})

    def read(self, folder: Path, options: StateOptions) -> Any:
        """Return this rank's shards, or the whole state if the checkpoint was not sharded."""
        shards = folder / f"{self.name}{SHARDS_ENDING}"
        if not shards.is_dir():
            return super().read(folder, options)
        tree = Json.read(folder / f"{self.name}.json")
        encoded = Encoded(tree, read_shards(shards))
        state = decode(encoded, options.allow_pickle, f"the state of {self.name}")
        targets = self.targets()
        state["state"] = {
            name: {key: _sharded_like(value, targets.get(name)) for key, value in values.items()}
            if isinstance(values, dict)
            else values
            for name, values in state["state"].items()
        }
        state["param_groups"] = [  # some optimizers count their steps there, in a tensor
            {key: _sharded_like(value, None) for key, value in group.items()} for group in state["param_groups"]
        ]
        return state


def shard_files(name: str, tensors: Mapping[str, Any], rank: int) -> dict[str, Content]:
    """Return the file with this rank's shards of tensors."""
    # Many tensors have one sharding: torch computes ranks and regions from the mesh each time.
    writes, region = cache(_writes), cache(_region)
    chunks = {
        key: chunk for key, value in tensors.items() if (chunk := _chunk(value, rank, writes, region)) is not None
    }
    return {f"{name}{SHARDS_ENDING}/{shard_file(rank)}": shard_content(chunks)}


def filled_like(target: Any, saved: SavedTensor) -> Tensor:
    """Return a tensor with the sharding of `target` and the saved values."""
    if not hasattr(target, "_local_tensor"):
        return saved.read().to(target.device)
    filled: Any = torch.empty_like(target, dtype=saved.dtype, requires_grad=False)
    _fill(filled, saved)
    return filled


def _fill(target: Any, saved: SavedTensor) -> None:
    if not hasattr(target, "_local_tensor"):
        target.copy_(saved.read())
    elif target._local_tensor.numel():
        sizes, offsets = _region(target.shape, target.device_mesh, target.placements)
        target._local_tensor.copy_(saved.read(offsets, sizes))


def _sharded_like(value: Any, parameter: Any) -> Any:
    if isinstance(value, QuantizedState):
        if not hasattr(parameter, "_local_tensor"):
            return value.mapped(SavedTensor.read).joined()
        return value.split_like(
            parameter, lambda parts: [_fill(part, value.parts[name]) for name, part in parts.items()]
        )
    if not isinstance(value, SavedTensor):
        return value
    if parameter is None or not hasattr(parameter, "_local_tensor") or not value.shape:
        return value.read()
    if value.shape == parameter.shape:
        return filled_like(parameter, value)
    # Another shape, such as the row and column statistics of Adafactor: whole on each rank.
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = value.read().to(parameter._local_tensor.device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _chunk(
    value: Any, rank: int, writes: Callable[[Any, Any], bool], region: Callable[[Any, Any, Any], _Region]
) -> Chunk | None:
    """Return the part of a tensor that this rank writes; `None` if it writes none."""
    if not hasattr(value, "_local_tensor"):
        return Chunk(value, [0] * value.dim()) if rank == 0 else None
    sharding = value.device_mesh, value.placements
    if not writes(*sharding):
        return None
    local = local_shard(value).detach()
    return Chunk(local, region(value.shape, *sharding)[1]) if local.numel() else None


def _writes(mesh: Any, placements: tuple[Any, ...]) -> bool:
    """Whether this rank writes shards: the first of several replicas does.

    A mesh of some ranks holds what others hold too, unless rank 0 is in it.
    """
    places = zip(mesh.get_coordinate(), placements, strict=True)
    return 0 in mesh.mesh and not any(at and placement.is_replicate() for at, placement in places)


def _region(shape: Any, mesh: Any, placements: Any) -> _Region:
    """Return the sizes and offsets of this rank's shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)
