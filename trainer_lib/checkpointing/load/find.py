"""This file is finding the state to load, and saying what is there instead if it is not."""

from trainer_lib.checkpointing.format.layout import (
    AUTOMATIC_FOLDER,
    MANIFEST_NAME,
    automatic_name,
    automatic_number,
    committed,
    is_committed,
    path_of,
)
from trainer_lib.checkpointing.format.manifest import Manifest, read_manifest
from trainer_lib.checkpointing.load.verification import check_bytes, check_sizes
from trainer_lib.checkpointing.save.retention import automatic_states
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.checkpointing.third_party.third_party import advice, library_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, did_you_mean


def find_state(given: str | AnyPath) -> AnyPath:
    """Return the folder that holds the state of this name.

    Raises:
        CheckpointError: If there is none, with what is there instead.
    """
    folder = path_of(given).absolute()
    found = committed(folder)
    if found is not None:
        return found
    if not folder.exists():
        raise CheckpointError(f"There is no state {folder}.{_instead(folder)}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and a state is a folder.{_instead(folder)}")
    inside = next((path for path in (folder / AUTOMATIC_FOLDER, folder) if automatic_states(path)), None)
    if inside is not None:
        newest = list(automatic_states(inside).values())[-1]
        raise CheckpointError(f"{folder} is no state, but a folder of states. The newest in it is {newest}.")
    if (library := library_of(folder)) is not None:
        raise CheckpointError(advice(folder, library))
    raise CheckpointError(
        f"{folder} has no {MANIFEST_NAME}: it is no state, or was not written to the end.{_instead(folder)}"
    )


def newest_state(project: AnyPath) -> AnyPath:
    """Return the newest state of a project under automatic naming.

    On a disk one without a manifest is one too, and damaged; behind a URL it never was there.

    Raises:
        CheckpointError: If there is none.
    """
    folder = project / AUTOMATIC_FOLDER
    named = [path for path in storage_of(folder).states() if automatic_number(path.name) is not None]
    states = [path for path in named if library_of(path) is None]
    if not states:
        raise CheckpointError(
            f"There is no state to load yet in {project / AUTOMATIC_FOLDER}. Call save_state first, or give the folder "
            "of a state: load_state(folder)."
        )
    newest = folder / automatic_name(max(automatic_number(path.name) or 0 for path in states))
    return committed(newest) or newest


def open_state(folder: AnyPath) -> Manifest:
    """Return the manifest of a state whose files are all there, in full length; what is in them is not read.

    Raises:
        CheckpointError: If it is not.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def verify_state(folder: AnyPath) -> Manifest:
    """Return the manifest of a state of which this process has read every byte.

    Raises:
        DamagedError: If it is not as it was written.
    """
    manifest = open_state(folder)
    check_bytes(folder, manifest)
    return manifest


def _instead(folder: AnyPath) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    states = [path.name for path in sorted(parent.iterdir()) if is_committed(path)]
    if not states:
        return ""
    automatic = automatic_states(parent)
    newest = f" The newest is {list(automatic.values())[-1].name!r}." if automatic else ""
    shown = ", ".join(states[-5:])
    return f" In {parent} there are: {shown}.{did_you_mean(folder.name, states)}{newest}"
