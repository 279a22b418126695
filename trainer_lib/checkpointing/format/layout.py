"""The names of files and folders in a checkpoint and beside it."""

import re
import stat
from pathlib import Path
from typing import Any, TypeVar, cast

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, path_at
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, OccupiedError

_Path = TypeVar("_Path", bound=AnyPath)

MANIFEST_NAME = "manifest.json"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler"
RNG_STATE_NAME = "random_states"
CUSTOM_STATE_NAME = "custom_checkpoint"
ENGINE_NAME = "engine"
AUTOMATIC_FOLDER = "checkpoints"  # in a project's folder

_AUTOMATIC = r"checkpoint_(\d+)"
_NUMBERED = r"checkpoint[-_]\d+(\.replaced)?"  # of a project, or of a run of a Trainer
_OF_ACCELERATE = (
    r"(optimizer|scheduler|sampler|dl_state_dict|custom_checkpoint|random_states|model|pytorch_model|"
    r"pytorch_model_fsdp)(_\d+)?\.(bin|pkl|safetensors)|scaler\.pt|(pytorch_model_fsdp|optimizer)_\d+/.+"
)
_UNFINISHED = (".partial", ".deleted")  # of saves and deletions


def numbered(stem: str, index: int) -> str:
    """Return the name of the part with this index: `optimizer`, `optimizer_1` and so on."""
    return f"{stem}_{index}" if index else stem


def automatic_name(number: int) -> str:
    """Return the name of a checkpoint folder under automatic naming."""
    return f"checkpoint_{number}"


def automatic_number(name: str) -> int | None:
    """Return the number in an automatic name, with or without `.replaced`; `None` for any other name."""
    match = re.fullmatch(_AUTOMATIC, name.removesuffix(".replaced"))
    return int(match[1]) if match else None


def is_debris(name: str) -> bool:
    """Whether an interrupted save or deletion left a folder of this name; also true while either is running.

    Example:
        >>> is_debris("checkpoint-00000500.partial"), is_debris("checkpoint_3.deleted"), is_debris("mine.partial")
        (True, True, False)
    """
    stem, dot, ending = name.rpartition(".")
    return dot + ending in _UNFINISHED and re.fullmatch(_NUMBERED, stem) is not None


def partial_beside(folder: Path) -> Path:
    """Return the folder that a checkpoint is written to before it is complete."""
    return folder.with_name(f"{folder.name}.partial")


def replaced_beside(folder: _Path) -> _Path:
    """Return the folder that an older checkpoint is moved to while a new one replaces it."""
    return cast(Any, folder.with_name(f"{folder.name}.replaced"))


def deleted_beside(folder: Path) -> Path:
    """Return the folder that a checkpoint is moved to while it is deleted."""
    return folder.with_name(f"{folder.name}.deleted")


def damaged_beside(folder: AnyPath) -> AnyPath:
    """Return an unused name for a damaged checkpoint: it is kept for inspection and never loaded."""
    return _unused_beside(folder, "damaged")


def other_run_beside(folder: AnyPath) -> AnyPath:
    """Return an unused name for the checkpoint of another run, which is in the place of one of this run."""
    return _unused_beside(folder, "other-run")


def _unused_beside(folder: AnyPath, ending: str) -> AnyPath:
    names = [f"{folder.name}.{ending}", *(f"{folder.name}.{ending}-{number}" for number in range(2, 1000))]
    return next(folder.with_name(name) for name in names if not folder.with_name(name).exists())


def is_of_accelerate(name: str) -> bool:
    """Whether a file is one of a checkpoint of Accelerate, by its name.

    Example:
        >>> is_of_accelerate("optimizer_1.bin"), is_of_accelerate("vocab.txt")
        (True, False)
    """
    return re.fullmatch(_OF_ACCELERATE, name) is not None


def has_accelerates_layout(folder: Path) -> bool:
    """Whether a folder is a checkpoint in the layout of Accelerate, which has no manifest."""
    return not is_committed(folder) and (folder / f"{RNG_STATE_NAME}_0.pkl").is_file()


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint holds weights and buffers of a model, by its name.

    Example:
        >>> is_weights("model_1.safetensors"), is_weights("model.shards/a.safetensors"), is_weights("optimizer.json")
        (True, True, False)
    """
    return name.startswith(("model", "pytorch_model"))


def is_optimizer_state(name: str) -> bool:
    """Whether a file of a checkpoint holds the state of an optimizer, by its name.

    Example:
        >>> is_optimizer_state("optimizer_1.safetensors"), is_optimizer_state("model.safetensors")
        (True, False)
    """
    return name.startswith(OPTIMIZER_NAME)


def is_committed(folder: AnyPath) -> bool:
    """Whether a folder holds a complete checkpoint: one with a manifest.

    One that this process may not read counts: reading its manifest raises the error that says so.
    """
    manifest = folder / MANIFEST_NAME
    if isinstance(manifest, RemotePath):
        return manifest.is_file()
    try:
        return stat.S_ISREG(manifest.stat().st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def committed(folder: _Path) -> _Path | None:
    """Return where the checkpoint of this name is: in its folder, or beside it if a rename was interrupted."""
    return next((path for path in (folder, replaced_beside(folder)) if is_committed(path)), None)


def checkpoint_path(folder: str | AnyPath) -> AnyPath:
    """Return the path of a checkpoint folder.

    Raises:
        ConfigurationError: If `folder` is not a path.
    """
    try:
        return path_at(folder)
    except TypeError as error:
        raise ConfigurationError(f"A checkpoint folder must be a path (got {shown(folder)}).") from error


def state_folder(path: str | AnyPath) -> AnyPath:
    """Return the folder to save a checkpoint to.

    Raises:
        ConfigurationError: If the checkpoint cannot replace this folder as a whole.
        OccupiedError: If a file has this name.
    """
    folder = checkpoint_path(path).resolve()
    if isinstance(folder, RemotePath):
        if not folder.parent.name:
            raise ConfigurationError(
                f"{folder} is a bucket, and a checkpoint needs a folder of its own. Give {folder}/checkpoint."
            )
        return folder
    if folder.is_file():
        raise OccupiedError(f"{folder} is a file, and a checkpoint is a folder. Give another name.")
    if Path.cwd().is_relative_to(folder):
        raise ConfigurationError(
            f"{folder} is the working directory or above it, and a save replaces the checkpoint folder as a whole. "
            f"Give a folder inside it, such as {folder / 'checkpoint'}."
        )
    return folder
