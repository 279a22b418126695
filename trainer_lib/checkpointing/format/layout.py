"""This file is the names in a state folder and beside it."""

import re
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

_AUTOMATIC = re.compile(r"checkpoint_(\d+)")
_NUMBERED = re.compile(r"checkpoint[-_]\d+(\.replaced)?")  # of a project, or of a run of a Trainer
_ON_THE_WAY = (".partial", ".deleted")


def numbered(stem: str, index: int) -> str:
    """Return the name of the first, second … of a kind."""
    return f"{stem}_{index}" if index else stem


def automatic_name(number: int) -> str:
    """Return the name of a state folder under automatic naming."""
    return f"checkpoint_{number}"


def automatic_number(name: str) -> int | None:
    """Return the number in such a name, or of what stands beside such a folder; `None` if it is another name."""
    found = _AUTOMATIC.fullmatch(name.removesuffix(".replaced"))
    return int(found[1]) if found else None


def is_debris(name: str) -> bool:
    """Whether a folder of this name is left of a save or a deletion that was cut short, if neither is under way.

    Example:
        >>> is_debris("checkpoint-00000500.partial"), is_debris("checkpoint_3.deleted"), is_debris("mine.partial")
        (True, True, False)
    """
    stem, dot, ending = name.rpartition(".")
    return dot + ending in _ON_THE_WAY and _NUMBERED.fullmatch(stem) is not None


def partial_beside(folder: Path) -> Path:
    """Return where a state is written before it is there."""
    return folder.with_name(f"{folder.name}.partial")


def replaced_beside(folder: _Path) -> _Path:
    """Return where an older state stands until the newer one of the same name is there."""
    return cast(Any, folder.with_name(f"{folder.name}.replaced"))


def deleted_beside(folder: Path) -> Path:
    """Return where something stands while it is being deleted."""
    return folder.with_name(f"{folder.name}.deleted")


def damaged_beside(folder: AnyPath) -> AnyPath:
    """Return a free name for a state that is damaged: kept for people to look at, and never looked at again."""
    names = [f"{folder.name}.damaged", *(f"{folder.name}.damaged-{number}" for number in range(2, 1000))]
    return next(folder.with_name(name) for name in names if not folder.with_name(name).exists())


def is_weights(name: str) -> bool:
    """Whether a file in a state holds weights and buffers of a model, by its name.

    Example:
        >>> is_weights("model_1.safetensors"), is_weights("model.shards/a.safetensors"), is_weights("optimizer.json")
        (True, True, False)
    """
    return name.startswith(("model", "pytorch_model"))


def is_optimizer_state(name: str) -> bool:
    """Whether a file in a state holds the state of an optimizer, by its name.

    Example:
        >>> is_optimizer_state("optimizer_1.safetensors"), is_optimizer_state("model.safetensors")
        (True, False)
    """
    return name.startswith(OPTIMIZER_NAME)


def is_committed(folder: AnyPath) -> bool:
    """Whether a folder holds a state that was written to the end."""
    return (folder / MANIFEST_NAME).is_file()


def committed(folder: _Path) -> _Path | None:
    """Return where the state of this name is: in its folder, or beside it if a rename was cut short."""
    return next((path for path in (folder, replaced_beside(folder)) if is_committed(path)), None)


def path_of(given: str | AnyPath) -> AnyPath:
    """Return what was given as a path.

    Raises:
        ConfigurationError: If it is none.
    """
    try:
        return path_at(given)
    except TypeError as error:
        raise ConfigurationError(f"A state is in a folder, given by its path; got {shown(given)}.") from error


def state_folder(given: str | AnyPath) -> AnyPath:
    """Return the folder to save to.

    Raises:
        ConfigurationError: If it cannot be a folder of its own.
        OccupiedError: If a plain file has its name.
    """
    folder = path_of(given).resolve()
    if isinstance(folder, RemotePath):
        if not folder.parent.name:
            raise ConfigurationError(
                f"{folder} is a bucket, and a state takes a folder of its own. Give {folder}/state."
            )
        return folder
    if folder.is_file():
        raise OccupiedError(f"{folder} is a file, and a state is a folder. Give another name.")
    if Path.cwd().is_relative_to(folder):
        raise ConfigurationError(
            f"{folder} is the working directory or above it, and a state takes a folder of its own, which is replaced "
            f"as a whole. Give a folder inside, such as {folder / 'state'}."
        )
    return folder
