"""Opening a checkpoint on all ranks with every byte verified, and setting aside a damaged one."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib.checkpointing.format.layout import damaged_beside
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part, StateOptions
from trainer_lib.checkpointing.load.find import open_state
from trainer_lib.checkpointing.load.local_files import LocalFiles, local_files
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.process_group import ProcessGroup


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose every byte was verified.

    Attributes:
        manifest: Its manifest.
        files: Its files, on this machine.
    """

    manifest: Manifest
    files: LocalFiles

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.files.folder

    def read(self, part: Part, options: StateOptions) -> Any:
        """Return the state of a part that this rank loads."""
        return part.read(self.files.folder, replace(options, load=self.files.load))

    def release(self) -> None:
        """Drop what was copied or read."""
        self.files.release()


def open_verified(
    folder: AnyPath,
    group: ProcessGroup,
    operation: str,
    reader: int,
    readers: int,
    is_loaded_next: bool = False,
) -> OpenedCheckpoint:
    """Verify every byte of a checkpoint and return it; the ranks share the reading.

    Args:
        folder: The checkpoint.
        group: The ranks, which all return or raise the same.
        operation: The call that the user made, for errors.
        reader: The number of this rank among those that share this folder.
        readers: How many ranks share it.
        is_loaded_next: Whether the checkpoint will be opened again to be loaded, without reading every byte again.

    Raises:
        DamagedError: If it is damaged.
        CheckpointError: If it cannot be read for another reason.
    """
    files = local_files(folder, group, operation, reader, readers)
    try:
        # It is damaged only if every rank that fails calls it damaged.
        with raise_on_all_ranks(group, f"{operation}: checking the checkpoint", CheckpointError):
            manifest = open_state(folder)
            files.check(manifest)
    except CheckpointError:
        files.release()
        raise
    if is_loaded_next:
        files.keep()
    return OpenedCheckpoint(manifest, files)


def set_aside(folder: AnyPath, group: ProcessGroup, operation: str, leads: bool) -> AnyPath:
    """Rename a damaged checkpoint, so that it is never loaded, and return its new path.

    Args:
        folder: The checkpoint.
        group: The ranks.
        operation: The call that the user made, for errors.
        leads: Whether this rank renames folders.
    """
    aside = damaged_beside(folder)
    with raise_on_all_ranks(group, operation, CheckpointError):
        if leads:
            try:
                storage_of(folder).rename(aside.name)
            except OSError as error:
                raise CheckpointError(
                    f"{folder} is damaged, and could not be renamed to {aside.name}: {error.strerror}. Move it away."
                ) from error
    return aside
