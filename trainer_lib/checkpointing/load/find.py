"""Finding the checkpoint to load, and errors that list the checkpoints that exist instead."""

from trainer_lib.checkpointing.format.layout import (
    AUTOMATIC_FOLDER,
    MANIFEST_NAME,
    automatic_name,
    automatic_number,
    checkpoint_path,
    committed,
    is_committed,
    replaced_beside,
)
from trainer_lib.checkpointing.format.manifest import Manifest, read_manifest
from trainer_lib.checkpointing.load.verification import check_bytes, check_sizes
from trainer_lib.checkpointing.save.retention import automatic_states
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, did_you_mean


def find_state(path: str | AnyPath) -> AnyPath:
    """Return the folder of the checkpoint at this path, of this library or of another one that it reads.

    Raises:
        CheckpointError: If there is no checkpoint, with those that exist beside it.
    """
    from trainer_lib.checkpointing.third_party.third_party import library_of  # it needs torch

    folder = checkpoint_path(path).absolute()
    checkpoint = committed(folder)
    if checkpoint is not None:
        return checkpoint
    if not folder.exists():
        if library_of(replaced_beside(folder)) is not None:
            return replaced_beside(folder)
        raise CheckpointError(f"There is no checkpoint {folder}.{_alternatives(folder)}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder.{_alternatives(folder)}")
    inside = next((path for path in (folder / AUTOMATIC_FOLDER, folder) if automatic_states(path)), None)
    if inside is not None:
        newest = list(automatic_states(inside).values())[-1]
        raise CheckpointError(f"{folder} is a folder of checkpoints, not a checkpoint. The newest in it is {newest}.")
    if library_of(folder) is not None:
        return folder
    raise CheckpointError(
        f"{folder} has no {MANIFEST_NAME}: it is not a checkpoint, or its save was interrupted.{_alternatives(folder)}"
    )


def newest_state(project: AnyPath) -> AnyPath:
    """Return the newest checkpoint of a project under automatic naming.

    A folder without a manifest counts on a disk, where it is a damaged checkpoint. Behind a URL it is an unfinished
    save and does not count.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    folder = project / AUTOMATIC_FOLDER
    checkpoints = [path for path in storage_of(folder).states() if automatic_number(path.name) is not None]
    if not checkpoints:
        raise CheckpointError(
            f"There is no checkpoint to load yet in {project / AUTOMATIC_FOLDER}. Call save_state first, or give the "
            "folder of a checkpoint: load_state(folder)."
        )
    newest = folder / automatic_name(max(automatic_number(path.name) or 0 for path in checkpoints))
    return committed(newest) or newest


def open_state(folder: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint after checking the names and sizes of its files, but not their bytes.

    Raises:
        CheckpointError: If a file is missing or has another size.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def verify_state(folder: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint after checking every byte of its files, all of them on this rank.

    Raises:
        DamagedError: If a file is missing or has other bytes.
    """
    manifest = open_state(folder)
    check_bytes(folder, manifest)
    return manifest


def _alternatives(folder: AnyPath) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = [path.name for path in sorted(parent.iterdir()) if is_committed(path)]
    if not names:
        return ""
    automatic = automatic_states(parent)
    newest = f" The newest is {list(automatic.values())[-1].name!r}." if automatic else ""
    return f" In {parent} there are: {', '.join(names[-5:])}.{did_you_mean(folder.name, names)}{newest}"
