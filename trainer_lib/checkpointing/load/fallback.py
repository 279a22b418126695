"""This file is opening a state on all processes, every byte of it checked, and putting one aside that is damaged."""

from typing import NamedTuple

from trainer_lib.checkpointing.format.layout import damaged_beside
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.load.find import open_state
from trainer_lib.checkpointing.load.local_files import LocalFiles, local_files
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.process_group import ProcessGroup


class OpenedCheckpoint(NamedTuple):
    """A state of which every byte is as it was written.

    Attributes:
        manifest: Its manifest.
        files: Its files, on this machine.
    """

    manifest: Manifest
    files: LocalFiles


def open_verified(
    folder: AnyPath,
    group: ProcessGroup,
    doing: str,
    reader: int,
    readers: int,
    is_loaded_next: bool = False,
) -> OpenedCheckpoint:
    """Return a state of which every byte is as it was written; each process reads a part of them.

    Args:
        folder: The state.
        group: The processes, all of which get the same answer.
        doing: What this is a part of: the call that the user made.
        reader: The number of this process among those that share this folder.
        readers: How many share it.
        is_loaded_next: Whether it will be opened once more, to be loaded: then it need not be read again.

    Raises:
        DamagedError: If it is damaged.
        CheckpointError: If it cannot be read for another reason.
    """
    files = local_files(folder, group, doing, reader, readers)
    try:
        # It is damaged only if every rank that fails calls it damaged.
        with raise_on_all_ranks(group, f"{doing}: checking the checkpoint", CheckpointError):
            manifest = open_state(folder)
            files.check(manifest)
    except CheckpointError:
        files.release()
        raise
    if is_loaded_next:
        files.keep()
    return OpenedCheckpoint(manifest, files)


def set_aside(folder: AnyPath, group: ProcessGroup, doing: str, leads: bool) -> AnyPath:
    """Rename a damaged state, so that nobody takes it for a good one, and return what it is called now.

    Args:
        folder: The state.
        group: The processes.
        doing: What this is a part of.
        leads: Whether this process renames folders.
    """
    aside = damaged_beside(folder)
    with raise_on_all_ranks(group, doing, CheckpointError):
        if leads:
            try:
                storage_of(folder).rename(aside.name)
            except OSError as error:
                raise CheckpointError(
                    f"{folder} is damaged, and could not be renamed to {aside.name}: {error.strerror}. Move it away."
                ) from error
    return aside
