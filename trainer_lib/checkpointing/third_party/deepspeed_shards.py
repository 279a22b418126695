"""Whole fp32 weights from the shards that DeepSpeed's `save_checkpoint` writes, read without DeepSpeed."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.third_party.safe_pickles import read_tensors
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError

_RANKS = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_LONE = "mp_rank_00_model_states.pt"
_OF_OTHERS = re.compile(r"(layer_\d+.*|expert_\d+.*|.*mp_rank_(?!00)\d+_(model|optim)_states\.pt)")


def fp32_weights(folder: Path, tag: str | None = None, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Return the whole weights of a DeepSpeed checkpoint of stage 0 to 3, in fp32, and the model's buffers.

    Weights that share memory in the model share it here.

    Args:
        folder: The folder given to `save_checkpoint`, or the folder of one of its checkpoints.
        tag: The checkpoint in it, such as "global_step100"; by default the one in the file `latest`.
        exclude_frozen: Whether to leave out weights that are not trained.

    Raises:
        CheckpointError: If there is no such checkpoint, or files are missing or damaged.
        UnsupportedError: If tensors are split in another way too (tensor, pipeline or expert parallelism).
    """
    checkpoint = _checkpoint_in(folder, tag)
    _refuse_other_splits(checkpoint)
    of_ranks = _files(checkpoint, "model")
    models = [read_tensors(path) for path in of_ranks or [checkpoint / _LONE]]
    shards = [_mapping(read_tensors(path), "optimizer_state_dict", path) for path in _files(checkpoint, "optim")]
    try:
        return _weights(checkpoint, models, shards, exclude_frozen)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of DeepSpeed's, or is damaged: {type(error).__name__}: {error}"
        ) from error


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of DeepSpeed's, itself or in the folder that its file `latest` names."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(name == _LONE or _RANKS.fullmatch(name) for name in names) or (
        "latest" in names and any(folder.glob("*/*_model_states.pt"))
    )


def _checkpoint_in(folder: Path, tag: str | None) -> Path:
    latest = folder / "latest"
    if tag is None and ((folder / _LONE).is_file() or _files(folder, "model")):
        return folder
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    tags = sorted({path.parent.name for path in folder.glob("*/*_model_states.pt")})
    if tag in tags:
        return folder / tag
    given = "its file `latest` is missing, and no tag was given" if tag is None else f"there is no {tag!r}"
    raise CheckpointError(
        f"{folder} has no checkpoint of DeepSpeed's to read: {given}. Checkpoints in it: {', '.join(tags) or 'none'}. "
        "Give the folder that save_checkpoint wrote, and the tag of one of them."
    )


def _refuse_other_splits(checkpoint: Path) -> None:
    others = sorted(path.name for path in checkpoint.iterdir() if _OF_OTHERS.fullmatch(path.name))
    if others:
        raise UnsupportedError(
            f"{checkpoint} was saved with tensor, pipeline or expert parallelism ({others[0]}), and only the shards of "
            "ZeRO can be joined here. Convert it with DeepSpeed's ds_to_universal.py."
        )


def _files(checkpoint: Path, kind: str) -> list[Path]:
    """Return the files of all ranks in order.

    Raises:
        CheckpointError: If that of a rank is missing.
    """
    found: dict[int, Path] = {}
    for path in checkpoint.iterdir() if checkpoint.is_dir() else ():
        if (match := _RANKS.fullmatch(path.name)) and match[3] == kind:
            found[int(match[1])] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise CheckpointError(f"{checkpoint} is not whole: the {kind}_states of rank {missing[0]} are missing.")
    return [found[rank] for rank in sorted(found)]


def _mapping(values: Any, key: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(values, Mapping) or not isinstance(values.get(key), Mapping):
        raise CheckpointError(f"{path} is not a file of DeepSpeed's: it has no {key!r}.")
    return values[key]


def _weights(
    checkpoint: Path, models: Sequence[Any], shards: Sequence[Mapping[str, Any]], exclude_frozen: bool
) -> dict[str, Tensor]:
    first = models[0]
    if not shards:  # stage 0
        whole: dict[str, Tensor] = {name: v for name, v in first["module"].items() if isinstance(v, Tensor)}
    else:
        _check_ranks(checkpoint, shards)
        whole = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
        trained = _trained(checkpoint, first["param_shapes"], shards)
        if not exclude_frozen:
            known = {*whole, *trained, *first["shared_params"]}
            whole |= {name: v for name, v in _frozen(models, shards[0]).items() if name not in known}
        whole |= trained
        whole |= {name: whole[same] for name, same in first["shared_params"].items() if same in whole}
    converted = {id(tensor): tensor.float() if tensor.is_floating_point() else tensor for tensor in whole.values()}
    return {name: converted[id(tensor)] for name, tensor in whole.items()}


def _check_ranks(checkpoint: Path, shards: Sequence[Mapping[str, Any]]) -> None:
    counts = shards[0]["partition_count"]
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(shards):
        raise CheckpointError(
            f"{checkpoint} was saved by {count} ranks, and has the optim_states of {len(shards)}. Copy the missing "
            "files into it."
        )


def _frozen(models: Sequence[Any], of_rank_0: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights among which are those that are not trained; each rank holds a fragment with stage 3."""
    if not _is_stage_3(of_rank_0):
        return dict(models[0]["module"])
    fragments = [model["frozen_param_fragments"] for model in models]
    return {
        name: torch.cat([of_rank[name].reshape(-1) for of_rank in fragments])[: math.prod(shape)].view(shape)
        for name, shape in (models[0]["frozen_param_shapes"] or {}).items()
    }


def _is_stage_3(shards: Mapping[str, Any]) -> bool:
    return "fp32_flat_groups" in shards


def _trained(
    checkpoint: Path, shapes: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    if _is_stage_3(shards[0]):
        vectors = [torch.cat([part.reshape(-1) for part in rank["fp32_flat_groups"]]) for rank in shards]
        return _split_over_ranks(
            checkpoint, {name: shape for group in shapes for name, shape in group.items()}, vectors
        )
    whole: dict[str, Tensor] = {}
    paddings = shards[0].get("param_alignment_paddings")
    for number, group in enumerate(shapes):
        vector = torch.cat([rank["single_partition_of_fp32_groups"][number] for rank in shards])
        gaps = [0] * len(group) if paddings is None else paddings[number]
        whole |= _one_after_another(checkpoint, group, vector, gaps)
    return whole


def _one_after_another(
    checkpoint: Path, shapes: Mapping[str, Any], vector: Tensor, gaps: Sequence[int]
) -> dict[str, Tensor]:
    """Return the weights of a group of stage 1 or 2, which are one vector that is split over the ranks."""
    whole: dict[str, Tensor] = {}
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        size = math.prod(shape)
        _check_size(checkpoint, name, start + size, vector)
        whole[name] = vector[start : start + size].view(shape)
        start += size + gap
    return whole


def _split_over_ranks(checkpoint: Path, shapes: Mapping[str, Any], vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the weights of stage 3, each of which is split over the ranks."""
    whole: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        length = -(-size // len(vectors))
        _check_size(checkpoint, name, start + length, vectors[0])
        whole[name] = torch.cat([vector[start : start + length] for vector in vectors])[:size].view(shape)
        start += length
    return whole


def _check_size(checkpoint: Path, name: str, end: int, vector: Tensor) -> None:
    if end > vector.numel():
        raise CheckpointError(f"{checkpoint} is damaged: its shards end at {vector.numel()}, and {name} at {end}.")
