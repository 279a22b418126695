"""Converting checkpoints of other libraries: weights, optimizer, schedule, position in the data and generators."""

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

# Files beside the weights that `from_pretrained` reads: configurations and vocabularies.
_BESIDE = (".json", ".txt", ".model", ".jinja")
_NOT_BESIDE = ("trainer_state.json", ".index.json")


def convert(
    source: Path,
    target: str | Path,
    epochs: float | None = None,
    without: Collection[str] = (),
    max_shard_size: int | str = "10GB",
) -> ThirdPartyCheckpoint:
    """Convert a checkpoint of Hugging Face's Trainer or of Accelerate, and return what was read.

    Args:
        source: The folder of the checkpoint, which is not changed.
        target: The folder to create; it must not exist.
        epochs: The passes over the data that were made, such as 1.4, if the checkpoint does not record them.
        without: What to leave out: "optimizer", "scheduler", "scaler", "random_states".
        max_shard_size: The size of one file of weights.

    Raises:
        CheckpointError: If there is no checkpoint, it is damaged, or its pickles hold more than tensors and plain
            values.
        UnsupportedError: If it was saved in shards.
    """
    folder = state_folder(target)
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder} is a URL. Convert to a folder on this machine, and copy that to the URL.")
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already. Give a folder that does not exist.")
    checkpoint = read_third_party(source, without)
    if epochs is not None:
        checkpoint.epochs = epochs
    checkpoint.left_out[ENGINE_NAME] = "gradients of an unfinished accumulation window are not saved there"
    if checkpoint.epochs is None:
        checkpoint.left_out[SAMPLER_NAME] = (
            "the position in the data is not recorded: give --epochs, or skip batches yourself (skip_first_batches)"
        )
    files = _files(checkpoint, max_shard_size)
    with CheckpointWriter(folder, LoneProcess()) as saving:
        saving.write(files)
        _copy_beside(source, saving.folder, files)
        saving.commit(_manifest(checkpoint, files))
    return checkpoint


def _files(checkpoint: ThirdPartyCheckpoint, max_shard_size: int | str) -> dict[str, Content]:
    files: dict[str, Content] = {}
    for index, tensors in enumerate(checkpoint.weights):
        files |= weight_files(tensors, max_shard_size, index)
    order = {"in_order_of": checkpoint.library}
    states: dict[str, Any] = {
        **{numbered(OPTIMIZER_NAME, index): {**state, **order} for index, state in enumerate(checkpoint.optimizers)},
        **{numbered(SCHEDULER_NAME, index): state for index, state in enumerate(checkpoint.schedulers)},
        **{f"{CUSTOM_STATE_NAME}_{index}": state for index, state in enumerate(checkpoint.custom)},
        **{f"{RNG_STATE_NAME}_{rank}": state for rank, state in enumerate(checkpoint.generators)},
    }
    if checkpoint.scaler:
        states[SCALER_NAME] = checkpoint.scaler
    if checkpoint.epochs is not None:
        position = {
            "epoch": _full_epochs(checkpoint.epochs),
            "part_of_pass": checkpoint.epochs - _full_epochs(checkpoint.epochs),
        }
        states |= {f"{SAMPLER_NAME}.process_{rank}": position for rank in range(_world_size(checkpoint))}
    if checkpoint.library == TRAINER:
        states[f"{CUSTOM_STATE_NAME}_0"] = {"run": _run(checkpoint), "callbacks": {}, "averages": {}}
    for name, state in states.items():
        files |= state_files(name, state, StateOptions())
    return files


def _run(checkpoint: ThirdPartyCheckpoint) -> dict[str, Any]:
    """Return the counts of the run as a Trainer saves them, without samples, which the checkpoint does not record."""
    epochs = checkpoint.epochs or 0.0
    steps_per_epoch = round(checkpoint.step / epochs) if epochs else None
    in_epoch = 0 if steps_per_epoch is None else checkpoint.step - _full_epochs(epochs) * steps_per_epoch
    return {
        "step": checkpoint.step,
        "epoch": _full_epochs(epochs),
        "steps_in_epoch": max(in_epoch, 0),
        "steps_per_epoch": steps_per_epoch,
        "best": None,
        "history": checkpoint.history,
        "checkpoints": [],
    }


def _manifest(checkpoint: ThirdPartyCheckpoint, files: Collection[str]) -> Manifest:
    stems = {name.split(".", 1)[0] for name in files}
    counted = {
        OPTIMIZER_NAME: checkpoint.optimizers,
        SCHEDULER_NAME: checkpoint.schedulers,
        SAFE_MODEL_NAME: checkpoint.weights,
    }
    parts = [numbered(kind, index) for kind, states in counted.items() for index in range(len(states))]
    parts += [name for name in (SCALER_NAME, SAMPLER_NAME) if name in stems]
    # The first registered object has the number 0 in its file's name, but none in the part's name.
    parts += [
        numbered(CUSTOM_STATE_NAME, index) for index in range(len(checkpoint.custom) + (checkpoint.library == TRAINER))
    ]
    parts += [RNG_STATE_NAME] * bool(checkpoint.generators)
    return Manifest(
        world_size=_world_size(checkpoint),
        step=checkpoint.step,
        backwards=checkpoint.step,
        epoch=checkpoint.epochs,
        parts=parts,
        reasons=["imported"],
        origin={"library": checkpoint.library, "left_out": dict(checkpoint.left_out)},
    )


def _copy_beside(source: Path, folder: Path, files: Collection[str]) -> None:
    for path in sorted(source.iterdir()):
        is_wanted = path.suffix in _BESIDE and not path.name.endswith(_NOT_BESIDE) and path.name not in files
        if is_wanted and path.is_file() and not path.is_symlink():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise UnwritableError(f"{folder / path.name} could not be written: {error.strerror}.") from error


def _full_epochs(epochs: float) -> int:
    return math.floor(epochs + 1e-6)


def _world_size(checkpoint: ThirdPartyCheckpoint) -> int:
    return max(len(checkpoint.generators), 1)
