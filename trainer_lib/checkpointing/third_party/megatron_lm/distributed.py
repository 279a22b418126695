"""Checkpoints of Megatron-LM in the format `torch_dist`: whole weights, in shards of `torch.distributed.checkpoint`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.third_party.megatron_lm.models import FC1, Weights
from trainer_lib.checkpointing.third_party.megatron_lm.pieces import COMMON, check_version, iteration_of, read_state
from trainer_lib.checkpointing.third_party.torch_shards import read_tensors_of
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError

_FORMAT_FILE, _FORMAT = "metadata.json", "torch_dist"
# Not read: the optimizer's state, generators, and what Transformer Engine keeps beside weights.
_OTHER = re.compile(r"(chained_\d+\.)?optimizer\..*|rng_state.*|.*_extra_state.*")
_STACKED = re.compile(r"^(\w+)\.layers\.(?!\d+\.)(.*)$")  # a weight of all layers, along a first dimension
_GATE, _UP = f"{FC1}.weight_w", f"{FC1}.weight_v"


def read_distributed(folder: Path) -> tuple[Weights, Mapping[str, Any], int]:
    """Return the whole weights of a checkpoint, the arguments of its training, and its iteration.

    Any number of ranks may have written it: its shards say where in a whole weight they belong. No code in it runs.

    Args:
        folder: The folder of an iteration.

    Raises:
        CheckpointError: If it is damaged or not complete, or holds what is refused.
        UnsupportedError: If it has another format.
    """
    _check_format(folder)
    common = read_state(folder / COMMON)
    check_version(folder, common)
    weights: Weights = {}
    for name, value in read_tensors_of(folder, lambda name: _OTHER.fullmatch(name) is None).items():
        stacked = _STACKED.match(name)
        if stacked is None:
            weights[name] = value
        else:
            parts = {f"{stacked[1]}.layers.{number}.{stacked[2]}": part for number, part in enumerate(value)}
            weights |= {name: part.contiguous() for name, part in parts.items()}
    return _with_gates(folder, weights), vars(common["args"]), iteration_of(common)


def _check_format(folder: Path) -> None:
    path = folder / _FORMAT_FILE
    try:
        written = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Megatron-LM writes it last, so the checkpoint "
            "is not complete: take another iteration."
        ) from error
    if written != _FORMAT:
        raise UnsupportedError(
            f"{folder} has the format {written!r}. Formats that are converted: torch, {_FORMAT}. Megatron-LM converts "
            "others by its options --ckpt-convert-format and --ckpt-convert-save."
        )


def _with_gates(folder: Path, weights: Mapping[str, Tensor]) -> Weights:
    """Return the weights with gates and what they multiply in one tensor, if they were written apart."""
    joined = {name: value for name, value in weights.items() if not name.endswith((_GATE, _UP))}
    for name, gate in weights.items():
        if name.endswith(_GATE):
            up = weights.get(name.removesuffix(_GATE) + _UP)
            if up is None:
                raise CheckpointError(f"{folder} is damaged: it has {name} without its other half.")
            joined[name.removesuffix("_w")] = torch.cat([gate, up])
    return joined
