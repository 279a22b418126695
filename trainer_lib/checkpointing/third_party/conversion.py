"""This file is making a state of what another library saved: weights, optimizer, schedule, place and generators."""

import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    CUSTOM_STATE_NAME,
    ENGINE_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
    state_folder,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import StateOptions, state_files
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.third_party.third_party import TRAINER, ThirdPartyCheckpoint, read_third_party
from trainer_lib.foundation.errors import ConfigurationError, UnwritableError
from trainer_lib.process_group import LoneProcess
from trainer_lib.tensor_files.file_contents import Content
from trainer_lib.tensor_files.model_files import weight_files
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

# Texts beside the weights that a reader of the folder wants: configurations and vocabularies.
_BESIDE = (".json", ".txt", ".model", ".jinja")
_NOT_BESIDE = ("trainer_state.json", ".index.json")


def convert(
    source: Path,
    target: str | Path,
    epochs: float | None = None,
    without: Collection[str] = (),
    max_shard_size: int | str = "10GB",
) -> ThirdPartyCheckpoint:
    """Make a state of a checkpoint of Hugging Face's Trainer or of Accelerate, and return what was read of that.

    Args:
        source: The folder of the checkpoint, which stays as it is.
        target: The folder to make; it must not be there.
        epochs: The passes over the data that were made, such as 1.4, where the checkpoint does not tell.
        without: What to leave out: "optimizer", "scheduler", "scaler", "random_states".
        max_shard_size: The size of one file of weights.

    Raises:
        CheckpointError: If there is none, it is damaged, or holds pickles of more than tensors and plain values.
        UnsupportedError: If it was saved in shards.
    """
    folder = state_folder(target)
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder} is on another machine. Convert to a folder on this one, and copy it there.")
    if folder.exists():
        raise ConfigurationError(f"{folder} is there already. Give a folder that is not.")
    found = read_third_party(source, without)
    if epochs is not None:
        found.epochs = epochs
    found.left_out[ENGINE_NAME] = "gradients of an unfinished window are not saved there"
    if found.epochs is None:
        found.left_out[SAMPLER_NAME] = (
            "where in the data it was is not told: give it by --epochs, or skip batches as before (skip_first_batches)"
        )
    files = _files(found, max_shard_size)
    with CheckpointWriter(folder, LoneProcess()) as saving:
        saving.write(files)
        _copy_beside(source, saving.folder, files)
        saving.commit(_manifest(found, files))
    return found


def _files(found: ThirdPartyCheckpoint, max_shard_size: int | str) -> dict[str, Content]:
    files: dict[str, Content] = {}
    for index, tensors in enumerate(found.weights):
        files |= weight_files(tensors, max_shard_size, index)
    order = {"in_order_of": found.library}
    states: dict[str, Any] = {
        **{numbered(OPTIMIZER_NAME, index): {**one, **order} for index, one in enumerate(found.optimizers)},
        **{numbered(SCHEDULER_NAME, index): one for index, one in enumerate(found.schedulers)},
        **{f"{CUSTOM_STATE_NAME}_{index}": one for index, one in enumerate(found.custom)},
        **{f"{RNG_STATE_NAME}_{rank}": one for rank, one in enumerate(found.generators)},
    }
    if found.scaler:
        states[SCALER_NAME] = found.scaler
    if found.epochs is not None:
        place = {"epoch": _passes(found.epochs), "part_of_pass": found.epochs - _passes(found.epochs)}
        states |= {f"{SAMPLER_NAME}.process_{rank}": place for rank in range(_world(found))}
    if found.library == TRAINER:
        states[f"{CUSTOM_STATE_NAME}_0"] = {"run": _run(found), "callbacks": {}, "averages": {}}
    for name, state in states.items():
        files |= state_files(name, state, StateOptions())
    return files


def _run(found: ThirdPartyCheckpoint) -> dict[str, Any]:
    """Return the counts of the run, as a Trainer has them; those of samples are made up for where they are known."""
    epochs = found.epochs or 0.0
    steps_per_epoch = round(found.step / epochs) if epochs else None
    in_epoch = 0 if steps_per_epoch is None else found.step - _passes(epochs) * steps_per_epoch
    return {
        "step": found.step,
        "epoch": _passes(epochs),
        "steps_in_epoch": max(in_epoch, 0),
        "steps_per_epoch": steps_per_epoch,
        "best": None,
        "history": found.history,
        "checkpoints": [],
    }


def _manifest(found: ThirdPartyCheckpoint, files: Collection[str]) -> Manifest:
    stems = {name.split(".", 1)[0] for name in files}
    counted = {OPTIMIZER_NAME: found.optimizers, SCHEDULER_NAME: found.schedulers, SAFE_MODEL_NAME: found.weights}
    parts = [numbered(kind, index) for kind, states in counted.items() for index in range(len(states))]
    parts += [name for name in (SCALER_NAME, SAMPLER_NAME) if name in stems]
    # A part's name has no number where it is the first; its file has one.
    parts += [numbered(CUSTOM_STATE_NAME, index) for index in range(len(found.custom) + (found.library == TRAINER))]
    parts += [RNG_STATE_NAME] * bool(found.generators)
    return Manifest(
        world_size=_world(found),
        step=found.step,
        backwards=found.step,
        epoch=found.epochs,
        parts=parts,
        reasons=["imported"],
        origin={"library": found.library, "left_out": dict(found.left_out)},
    )


def _copy_beside(source: Path, folder: Path, files: Collection[str]) -> None:
    for path in sorted(source.iterdir()):
        is_wanted = path.suffix in _BESIDE and not path.name.endswith(_NOT_BESIDE) and path.name not in files
        if is_wanted and path.is_file() and not path.is_symlink():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise UnwritableError(f"{folder / path.name} could not be written: {error.strerror}.") from error


def _passes(epochs: float) -> int:
    return math.floor(epochs + 1e-6)


def _world(found: ThirdPartyCheckpoint) -> int:
    return max(len(found.generators), 1)
