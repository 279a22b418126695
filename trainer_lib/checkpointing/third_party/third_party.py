"""This file is checkpoints of Hugging Face's Trainer and of Accelerate: recognized, and read with nothing run."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer_lib.checkpointing.format.layout import is_committed, numbered
from trainer_lib.checkpointing.third_party.safe_pickles import read_generators, read_pickle
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.modules.names import canonical_name
from trainer_lib.tensor_files.model_files import find_weights, read_weights
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

TRAINER, ACCELERATE = "Hugging Face's Trainer", "Accelerate"

_TRAINER_STATE = "trainer_state.json"
_OF_TRAINER = (_TRAINER_STATE, "training_args.bin", "optimizer.pt", "rng_state.pth")
_OF_ACCELERATE = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model_fsdp.bin", "optimizer_0")
_SHARDED = re.compile(r"pytorch_model_fsdp(_\d+|\.bin)|optimizer_\d+|global_step\d+|zero_to_fp32\.py|\.metadata")
_NOT_READ = {
    "training_args.bin": "arguments are a pickle of a class: give TrainingArguments as before "
    "(TrainingArguments.from_transformers reads transformers')",
    "sampler.bin": "the order of shuffled data is a pickle of a class: the order here is another",
}


@dataclass
class ThirdPartyCheckpoint:
    """What was read of a checkpoint.

    Attributes:
        library: What wrote it.
        weights: The tensors of each model.
        optimizers: The states of optimizers, by numbers of parameters.
        schedulers: The states of schedules.
        generators: Those of each process.
        custom: What was registered.
        scaler: The scale of losses in fp16.
        step: The updates, as far as they are told.
        epochs: The passes over the data, if they are told.
        history: What was logged.
        left_out: What is not taken over, with the reason.
    """

    library: str
    weights: list[dict[str, Tensor]]
    optimizers: list[Any] = field(default_factory=list[Any])
    schedulers: list[Any] = field(default_factory=list[Any])
    generators: list[Any] = field(default_factory=list[Any])
    custom: list[Any] = field(default_factory=list[Any])
    scaler: Any = None
    step: int = 0
    epochs: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def library_of(folder: AnyPath) -> str | None:
    """Return which library wrote a folder, if it is one of those that are known."""
    if is_committed(folder) or not folder.is_dir():
        return None
    for library, names in ((TRAINER, _OF_TRAINER), (ACCELERATE, _OF_ACCELERATE)):
        if any((folder / name).exists() for name in names):
            return library
    return None


def advice(folder: AnyPath, library: str) -> str:
    """Return what to do with such a folder."""
    return (
        f"{folder} was written by {library}. `trainer-lib checkpoint convert {folder} TARGET` makes a checkpoint of it "
        "that can be gone on from; load_checkpoint_in_model(model, folder) reads the weights alone."
    )


def read_third_party(folder: Path, without: Collection[str] = ()) -> ThirdPartyCheckpoint:
    """Read a checkpoint.

    Args:
        folder: Where it is.
        without: What to leave out: "optimizer", "scheduler", "scaler", "random_states".

    Raises:
        CheckpointError: If it is none, is damaged, or a pickle in it holds more than tensors and plain values.
        UnsupportedError: If it was saved in shards.
    """
    library = library_of(folder)
    if library is None:
        raise CheckpointError(
            f"{folder} is no checkpoint of Hugging Face's Trainer or of Accelerate: it has none of "
            f"{', '.join([*_OF_TRAINER, *_OF_ACCELERATE[:3]])}."
        )
    _refuse_shards(folder)
    found = ThirdPartyCheckpoint(library, _weights(folder))
    ending = ".pt" if library == TRAINER else ".bin"
    found.optimizers = _states(found, folder, "optimizer", ending, without)
    found.schedulers = _states(found, folder, "scheduler", ending, without)
    found.scaler = next(iter(_states(found, folder, "scaler", ".pt", without, is_expected=False)), None)
    _read_generators(found, folder, without)
    if library == TRAINER:
        _read_trainer_state(found, folder)
    else:
        found.custom = _numbered(folder, lambda index: f"custom_checkpoint_{index}.pkl")
        if found.schedulers and len(found.generators) > 1:
            found.left_out["the unit of schedules"] = (
                f"there one moves {len(found.generators)} times an update, and here only in an "
                "Accelerator(scheduler_steps_per_process=True)"
            )
    found.left_out |= {name: reason for name, reason in _NOT_READ.items() if (folder / name).is_file()}
    return found


def _refuse_shards(folder: Path) -> None:
    sharded = sorted(path.name for path in folder.iterdir() if _SHARDED.fullmatch(path.name))
    if sharded:
        raise UnsupportedError(
            f"{folder} was saved by FSDP or DeepSpeed ({', '.join(sharded)}), in shards that are found by pickles of "
            "classes. Only what was saved by one process or by DDP is converted. For the weights alone: `accelerate "
            "merge-weights` (of DeepSpeed: zero_to_fp32.py) there, load_checkpoint_in_model(model, folder) here."
        )


def _weights(folder: Path) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    while (path := find_weights(folder, len(found)) or find_weights(folder, len(found), safe=False)) is not None:
        tensors = read_weights(path)
        # Accelerate saves the names of DDP's wrapper too.
        wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)
        found.append({canonical_name(name[7:] if wrapped else name): value for name, value in tensors.items()})
    if not found:
        raise CheckpointError(
            f"{folder} has no whole weights: no {SAFE_MODEL_NAME}.safetensors, no pytorch_model.bin, and no index of "
            f"either. It has {', '.join(sorted(path.name for path in folder.iterdir()))}. (Of an adapter, load it with "
            "PEFT into its model, and begin a new run.)"
        )
    return found


def _states(
    found: ThirdPartyCheckpoint,
    folder: Path,
    kind: str,
    ending: str,
    without: Collection[str],
    is_expected: bool = True,
) -> list[Any]:
    if kind in without:
        found.left_out[kind] = "as it was asked for"
        return []
    states = _numbered(folder, lambda index: f"{numbered(kind, index)}{ending}", kind)
    if not states and is_expected:
        found.left_out[kind] = "there is none"
    return states


def _numbered(folder: Path, name: Callable[[int], str], kind: str | None = None) -> list[Any]:
    states: list[Any] = []
    while (path := folder / name(len(states))).is_file():
        try:
            states.append(read_pickle(path))
        except CheckpointError as error:
            leave_out = f" To do without, say --without {kind}." if kind else " Move it away to do without."
            raise CheckpointError(f"{error}{leave_out}") from error
    return states


def _read_generators(found: ThirdPartyCheckpoint, folder: Path, without: Collection[str]) -> None:
    kind = "random_states"
    if kind in without:
        found.left_out[kind] = "as it was asked for"
        return
    several, one = ("rng_state_{}.pth", "rng_state.pth") if found.library == TRAINER else ("random_states_{}.pkl", "")
    paths = [folder / several.format(rank) for rank in range(len(list(folder.iterdir())))]
    paths = [path for path in [*paths, folder / one] if path.is_file()]
    try:
        found.generators = [read_generators(path) for path in paths]
        found.step = max([state.pop("step") for state in found.generators], default=0)
    except CheckpointError as error:
        found.left_out[kind] = str(error)
    if not paths:
        found.left_out[kind] = "there are none"


def _read_trainer_state(found: ThirdPartyCheckpoint, folder: Path) -> None:
    path = folder / _TRAINER_STATE
    try:
        state = json.loads(path.read_text())
        found.step, found.epochs = int(state["global_step"]), float(state["epoch"] or 0.0)
        found.history = [
            {name: value for name, value in entry.items() if isinstance(value, (int, float))}
            for entry in state.get("log_history", [])
            if "step" in entry and "epoch" in entry
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} tells nothing of the training: {error!r}.") from error
    if state.get("best_metric") is not None:
        found.left_out["best"] = "which metric says what is the best is not told: the search begins anew"
