"""Checkpoints of Hugging Face's Trainer and of Accelerate: recognizing them, and reading them without running code."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME, is_committed, numbered
from trainer_lib.checkpointing.third_party.safe_pickles import read_generators, read_pickle
from trainer_lib.checkpointing.third_party.torch_shards import is_sharded, read_whole
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME
from trainer_lib.tensor_files.weights_index import find_weights, read_weights

TRAINER, ACCELERATE = "Hugging Face's Trainer", "Accelerate"

_TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = (_TRAINER_STATE, "training_args.bin", "optimizer.pt", "rng_state.pth")
_ACCELERATE_FILES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model_fsdp.bin", "optimizer_0")
# Shards of DeepSpeed, and those that each rank of FSDP writes for itself (LOCAL_STATE_DICT).
_UNREADABLE = re.compile(r"global_step\d+|zero_to_fp32\.py|(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin")
_FSDP_MODEL = "pytorch_model_fsdp"
_AS_REQUESTED = "as requested"
_NOT_READ = {
    "training_args.bin": "the arguments are a pickled class: give TrainingArguments again "
    "(TrainingArguments.from_transformers converts those of transformers)",
    "sampler.bin": "the sampler is a pickled class: shuffled data has another order here",
}


@dataclass
class ThirdPartyCheckpoint:
    """The contents of a checkpoint of another library.

    Attributes:
        library: The library that wrote it.
        weights: The tensors and the extra state of each model.
        optimizers: The states of optimizers, by the index of each parameter.
        schedulers: The states of schedules.
        generators: The states of the random generators of each rank.
        custom: The states of registered objects.
        scaler: The state of the loss scaler (fp16).
        step: The optimizer steps, if recorded.
        epochs: The passes over the data, if recorded.
        loaders: The batches that each loader's current epoch has yielded; `None` for one without a record.
        world_size: How many ranks saved it.
        history: The logged values.
        left_out: What is not converted, with the reason.
    """

    library: str
    weights: list[dict[str, Any]]
    optimizers: list[Any] = field(default_factory=list[Any])
    schedulers: list[Any] = field(default_factory=list[Any])
    generators: list[Any] = field(default_factory=list[Any])
    custom: list[Any] = field(default_factory=list[Any])
    scaler: Any = None
    step: int = 0
    epochs: float | None = None
    loaders: list[int | None] = field(default_factory=list[int | None])
    world_size: int = 1
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def library_of(folder: AnyPath) -> str | None:
    """Return the library that wrote a folder; `None` if it is not a known one."""
    if is_committed(folder) or not folder.is_dir():
        return None
    for library, names in ((TRAINER, _TRAINER_FILES), (ACCELERATE, _ACCELERATE_FILES)):
        if any((folder / name).exists() for name in names):
            return library
    return None


def read_third_party(folder: Path, without: Collection[str] = ()) -> ThirdPartyCheckpoint:
    """Read a checkpoint of another library.

    Args:
        folder: The folder of the checkpoint.
        without: What to leave out: "optimizer", "scheduler", "scaler", "random_states".

    Raises:
        CheckpointError: If it is not such a checkpoint, is damaged, or its pickles hold more than tensors and plain
            values.
        UnsupportedError: If it was saved in shards.
    """
    library = library_of(folder)
    if library is None:
        raise CheckpointError(
            f"{folder} is not a checkpoint of Hugging Face's Trainer or of Accelerate: it has none of "
            f"{', '.join([*_TRAINER_FILES, *_ACCELERATE_FILES[:3]])}."
        )
    _refuse_unreadable(folder)
    checkpoint = ThirdPartyCheckpoint(library, _weights(folder))
    endings = (".pt", ".bin") if library == TRAINER else (".bin",)
    checkpoint.optimizers = _states(checkpoint, folder, "optimizer", endings, without)
    checkpoint.schedulers = _states(checkpoint, folder, "scheduler", endings, without)
    checkpoint.scaler = next(iter(_states(checkpoint, folder, "scaler", (".pt",), without, is_expected=False)), None)
    _read_generators(checkpoint, folder, without)
    if library == TRAINER:
        _read_trainer_state(checkpoint, folder)
    else:
        checkpoint.custom = _numbered(lambda index: folder / f"custom_checkpoint_{index}.pkl")
        checkpoint.loaders = _positions(folder)
        if checkpoint.schedulers and checkpoint.world_size > 1:
            checkpoint.left_out["the unit of schedules"] = (
                f"Accelerate steps a schedule {checkpoint.world_size} times per update: prepare it in an "
                "Accelerator(scheduler_steps_per_process=True)"
            )
    checkpoint.left_out |= {name: reason for name, reason in _NOT_READ.items() if (folder / name).is_file()}
    return checkpoint


def check_weights(checkpoint: ThirdPartyCheckpoint, folder: Path) -> None:
    """Raise if a checkpoint has no weights: a hook of Accelerate may have saved them in a way of its own."""
    if not checkpoint.weights:
        raise CheckpointError(
            f"{folder} has no whole weights: no {SAFE_MODEL_NAME}.safetensors, no pytorch_model.bin, no index of "
            f"either, and no {_FSDP_MODEL}_0. It has {', '.join(sorted(path.name for path in folder.iterdir()))}. "
            "(Adapters alone are not converted: give a Trainer this folder as `resume`.)"
        )


def _refuse_unreadable(folder: Path) -> None:
    sharded = sorted(path.name for path in folder.iterdir() if _UNREADABLE.fullmatch(path.name))
    if sharded:
        raise UnsupportedError(
            f"{folder} has shards that cannot be joined here, of DeepSpeed or of FSDP with LOCAL_STATE_DICT "
            f"({', '.join(sharded)}). For DeepSpeed's weights alone: `trainer-lib checkpoint zero-to-fp32 {folder} "
            "TARGET`, then load_checkpoint_in_model(model, TARGET)."
        )


def _weights(folder: Path) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = []
    while (tensors := _weights_of(folder, len(models))) is not None:
        # Accelerate saves the prefix of DDP's wrapper with the names.
        is_wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)
        models.append({canonical_name(name[7:] if is_wrapped else name): value for name, value in tensors.items()})
    return models


def _weights_of(folder: Path, index: int) -> dict[str, Any] | None:
    if (path := find_weights(folder, index) or find_weights(folder, index, safe=False)) is not None:
        return read_pickle(path) if path.suffix == ".bin" else read_weights(path)
    if (path := folder / f"{numbered(_FSDP_MODEL, index)}.bin").is_file():
        return read_pickle(path)
    if is_sharded(path := folder / f"{_FSDP_MODEL}_{index}"):
        return read_whole(path)["model"]
    return None


def _positions(folder: Path) -> list[int | None]:
    """Return the batches that stateful loaders yielded of their epoch; those that other loaders yielded are unknown."""
    names = {path.name for path in folder.iterdir()}
    count = 1 + max((index for index in range(len(names)) if _position_name(index) in names), default=-1)
    return [_batches_in(folder / _position_name(index)) for index in range(count)]


def _position_name(index: int) -> str:
    return f"{numbered('dl_state_dict', index)}.bin"


def _batches_in(path: Path) -> int | None:
    """Return the batches in the state of a StatefulDataLoader, with workers or without."""
    if not path.is_file():
        return None
    state = read_pickle(path)
    if not isinstance(state, dict) or state.get("_iterator_finished"):
        return 0
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    return int(state["_num_yielded"])


def _states(
    checkpoint: ThirdPartyCheckpoint,
    folder: Path,
    kind: str,
    endings: Collection[str],
    without: Collection[str],
    is_expected: bool = True,
) -> list[Any]:
    if kind in without:
        checkpoint.left_out[kind] = _AS_REQUESTED
        return []
    states: list[Any] = []
    for ending in endings:
        states = states or _numbered(lambda index, ending=ending: _state_path(folder, kind, index, ending), kind)
    if not states and is_expected:
        checkpoint.left_out[kind] = "the checkpoint has none"
    return states


def _state_path(folder: Path, kind: str, index: int, ending: str) -> Path:
    sharded = folder / f"{kind}_{index}"
    return sharded if is_sharded(sharded) else folder / f"{numbered(kind, index)}{ending}"


def _numbered(path_of: Callable[[int], Path], kind: str | None = None) -> list[Any]:
    states: list[Any] = []
    while (path := path_of(len(states))).exists():
        try:
            # Shards have no entry for a dict without values: the states of an optimizer that keeps none.
            states.append({"state": {}, **read_whole(path)[OPTIMIZER_NAME]} if is_sharded(path) else read_pickle(path))
        except CheckpointError as error:
            advice = f" To leave it out, give --without {kind}." if kind else " To leave it out, move the file away."
            raise CheckpointError(f"{error}{advice}") from error
    return states


def _read_generators(checkpoint: ThirdPartyCheckpoint, folder: Path, without: Collection[str]) -> None:
    kind = "random_states"
    of_trainer = checkpoint.library == TRAINER
    per_rank, single = ("rng_state_{}.pth", "rng_state.pth") if of_trainer else ("random_states_{}.pkl", "")
    paths = [folder / per_rank.format(rank) for rank in range(len(list(folder.iterdir())))]
    paths = [path for path in [*paths, folder / single] if path.is_file()]
    checkpoint.world_size = max(len(paths), 1)
    if kind in without:
        checkpoint.left_out[kind] = _AS_REQUESTED
        return
    try:
        checkpoint.generators = [read_generators(path) for path in paths]
        checkpoint.step = max([state.pop("step") for state in checkpoint.generators], default=0)
    except CheckpointError as error:
        checkpoint.left_out[kind] = str(error)
    if not paths:
        checkpoint.left_out[kind] = "the checkpoint has none"


def _read_trainer_state(checkpoint: ThirdPartyCheckpoint, folder: Path) -> None:
    path = folder / _TRAINER_STATE
    try:
        state = json.loads(path.read_text())
        checkpoint.step, checkpoint.epochs = int(state["global_step"]), float(state["epoch"] or 0.0)
        checkpoint.history = [
            {name: value for name, value in entry.items() if isinstance(value, (int, float))}
            for entry in state.get("log_history", [])
            if "step" in entry and "epoch" in entry
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as the state of a training: {error!r}.") from error
    if state.get("best_metric") is not None:
        checkpoint.left_out["best"] = (
            "the metric that selects the best checkpoint is not recorded: the best is forgotten"
        )
