"""The pieces of a checkpoint of Megatron-LM: one file for each rank of tensor and pipeline parallelism."""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.third_party.megatron_lm.models import FC1, QKV, Weights
from trainer_lib.checkpointing.third_party.safe_pickles import read_pickle, read_with_arrays
from trainer_lib.checkpointing.third_party.torch_shards import is_sharded
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError

FILE, TRACKER, COMMON = "model_optim_rng.pt", "latest_checkpointed_iteration.txt", "common.pt"
_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(_\d\d\d)?")
_LAYER = re.compile(r"^(\w+)\.layers\.(\d+)\.(.*)$")
# What other names in these pickles stand for: settings, and states that are not read.
_INERT = re.compile(r"argparse\.Namespace|megatron\..*|transformer_engine\..*|_io\.BytesIO|signal\.Signals|pathlib\..*")

# Weights that are cut along their first or their second dimension; all others are whole on each rank.
_BY_ROWS = (f"{QKV}.weight", f"{QKV}.bias", f"{FC1}.weight", f"{FC1}.bias")
_BY_COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


class Inert(Namespace):
    """Takes the place of a class of another library in a pickle: it holds values, and does nothing."""

    def __init__(self, *values: Any) -> None:
        super().__init__(values=values)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def iteration_folder(folder: Path) -> Path | None:
    """Return the folder with the pieces, inside a folder of checkpoints or itself; `None` for other folders."""
    if any(_FOLDER.fullmatch(path.name) for path in folder.glob("mp_rank_*")) or is_distributed(folder):
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker} must hold an iteration, or release (got {text[:40]!r}).")
    return folder / ("release" if text == "release" else f"iter_{int(text):07d}")


def is_distributed(folder: Path) -> bool:
    """Whether a folder has no pieces of ranks, but shards of whole weights (`torch_dist`)."""
    return is_sharded(folder) and (folder / COMMON).is_file()


def read_pieces(folder: Path) -> tuple[Weights, Mapping[str, Any], int]:
    """Return the whole weights of a checkpoint, the arguments of its training, and its iteration.

    Raises:
        CheckpointError: If a piece is missing, or holds what is refused.
        UnsupportedError: If it has another format.
    """
    pieces = {_place(path): _read(path / FILE) for path in sorted(folder.glob("mp_rank_*"))}
    if not pieces:
        raise UnsupportedError(
            f"{folder} has no mp_rank_* folders and no shards: it is no checkpoint of Megatron-LM's formats torch and "
            "torch_dist. Convert it with Megatron-LM's options --ckpt-convert-format torch and --ckpt-convert-save."
        )
    tensor, stages = (1 + max(place[index] for place in pieces) for index in range(2))
    missing = [(rank, stage) for rank in range(tensor) for stage in range(stages) if (rank, stage) not in pieces]
    first = next(iter(pieces.values()))
    arguments = vars(first["args"])
    if missing or tensor != arguments.get("tensor_model_parallel_size", tensor):
        raise CheckpointError(
            f"{folder} lacks pieces: it has {len(pieces)}, of {arguments.get('tensor_model_parallel_size', tensor)} "
            f"tensor and {arguments.get('pipeline_model_parallel_size', stages)} pipeline parallel ranks. Copy all "
            "mp_rank_* folders."
        )
    check_version(folder, first)
    is_gated = bool(arguments.get("swiglu"))
    joined = [_joined(folder, [pieces[rank, stage] for rank in range(tensor)], is_gated) for stage in range(stages)]
    if len({len(stage) for stage in joined}) != 1:
        raise CheckpointError(
            f"{folder} is damaged: its stages must have the same number of chunks (got {[len(s) for s in joined]})."
        )
    return _in_order(joined), arguments, iteration_of(first)


def check_version(folder: Path, state: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has the layout of weights that Megatron-LM writes today.

    Raises:
        CheckpointError: If its version is no number.
        UnsupportedError: If it is older.
    """
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float):
        raise CheckpointError(f"{folder} is damaged: its checkpoint_version must be a number (got {version!r}).")
    if version < 3:
        raise UnsupportedError(
            f"{folder} has checkpoint_version {float(version)}. Load and save it with Megatron-LM, which writes 3.0."
        )


def iteration_of(state: Mapping[str, Any]) -> int:
    """Return the iteration of a checkpoint."""
    return int(state.get("iteration", 0))


def read_state(path: Path) -> dict[str, Any]:
    """Return the contents of a file with the arguments of a training; no code in it is run.

    Raises:
        CheckpointError: If it cannot be read, or has no arguments.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if path.is_file() else []
    except (OSError, RuntimeError, ValueError, LookupError, AssertionError, TypeError, EOFError, UnpicklingError):
        names = []  # reading it says what is wrong
    inert: list[Any] = [(Inert, name) for name in names if _INERT.fullmatch(name)]
    with torch.serialization.safe_globals(inert):
        state = read_with_arrays(path) if any("numpy" in name for name in names) else read_pickle(path)
    if not isinstance(state, dict) or not isinstance(state.get("args"), Namespace):
        raise _foreign(path)
    return state


def _place(path: Path) -> tuple[int, int]:
    found = _FOLDER.fullmatch(path.name)
    if found is None or found[3]:
        raise UnsupportedError(f"{path} is a piece of a model of experts, which is not converted.")
    return int(found[1]), int(found[2] or 0)


def _read(path: Path) -> dict[str, Any]:
    """Return the contents of a piece; no code in it is run."""
    state = read_state(path)
    if not _chunk_names(state):
        raise _foreign(path)
    return state


def _foreign(path: Path) -> CheckpointError:
    missing = "args" if path.name == COMMON else "args and no model"
    return CheckpointError(f"{path} is no piece of a checkpoint of Megatron-LM: it has no {missing}.")


def _chunk_names(piece: Mapping[Any, Any]) -> list[str]:
    """Return the keys of a piece's chunks in their order."""
    names = [key for key in piece if isinstance(key, str) and re.fullmatch(r"model\d*", key)]
    chunks = [name for name in names if isinstance(piece[name], Mapping)]
    return ["model"] if "model" in chunks else sorted(chunks, key=lambda name: int(name.removeprefix("model")))


def _joined(folder: Path, ranks: Sequence[Mapping[str, Any]], is_gated: bool) -> list[Weights]:
    """Return the weights of a stage, of each of its chunks, from those of the tensor parallel ranks."""
    first = ranks[0]
    chunks: list[Weights] = []
    for key in _chunk_names(first):
        names = [name for name, value in first[key].items() if isinstance(value, Tensor) and "_extra_state" not in name]
        for name in names:
            if not all(isinstance(rank.get(key, {}).get(name), Tensor) for rank in ranks):
                raise CheckpointError(f"{folder} is damaged: not all tensor parallel ranks have {name} of {key}.")
        try:
            chunks.append({name: join(name, [rank[key][name] for rank in ranks], is_gated) for name in names})
        except (RuntimeError, IndexError) as error:
            raise CheckpointError(f"{folder} is damaged: the parts of a weight do not fit together: {error}") from error
    return chunks


def join(name: str, parts: Sequence[Tensor], is_gated: bool) -> Tensor:
    """Return a whole weight from those of the tensor parallel ranks."""
    if len(parts) == 1 or _dimension(name) is None:
        return parts[0]
    if is_gated and FC1 in name:
        pairs = [part.chunk(2) for part in parts]
        return torch.cat([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
    return torch.cat(list(parts), dim=_dimension(name) or 0)


def split(name: str, weight: Tensor, count: int, is_gated: bool) -> list[Tensor]:
    """Return the parts of a weight that tensor parallel ranks have."""
    dimension = _dimension(name)
    if count == 1 or dimension is None:
        return [weight] * count
    parts = 2 * count if is_gated and FC1 in name else count  # each rank has a part of the gate, and one of the rest
    if weight.shape[dimension] % parts:
        raise UnsupportedError(
            f"{name} of shape {tuple(weight.shape)} cannot be cut into {parts} parts. Choose fewer tensor parallel "
            "ranks."
        )
    if is_gated and FC1 in name:
        gates, ups = (half.chunk(count) for half in weight.chunk(2))
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    return [part.contiguous() for part in weight.chunk(count, dim=dimension)]


def _dimension(name: str) -> int | None:
    if name in _VOCABULARY or name.endswith(_BY_ROWS):
        return 0
    return 1 if name.endswith(_BY_COLUMNS) else None


def _in_order(stages: Sequence[Sequence[Weights]]) -> Weights:
    """Return the weights of all stages; layers are counted through chunks, and the stages of each chunk."""
    whole: Weights = {}
    before = 0
    for chunk in range(max(len(stage) for stage in stages)):
        for stage in stages:
            layers = 0
            for name, weight in stage[chunk].items():
                found = _LAYER.match(name)
                if found:
                    layers = max(layers, int(found[2]) + 1)
                    name = f"{found[1]}.layers.{int(found[2]) + before}.{found[3]}"
                whole.setdefault(name, weight)
            before += layers
    return whole


def cut_into_stages(weights: Weights, stack: str, layers: int, stages: int, is_tied: bool) -> list[Weights]:
    """Return the weights of each stage of a pipeline: the first has the embeddings, the last what follows layers."""
    if layers % stages:
        raise UnsupportedError(f"{layers} layers cannot be cut into {stages} stages of the same size.")
    each = layers // stages
    parts: list[Weights] = [{} for _ in range(stages)]
    for name, weight in weights.items():
        found = _LAYER.match(name)
        if found:
            stage, layer = divmod(int(found[2]), each)
            parts[stage][f"{stack}.layers.{layer}.{found[3]}"] = weight
        else:
            parts[0 if name.startswith("embedding.") else -1][name] = weight
    if is_tied and stages > 1:
        parts[-1]["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    return parts
