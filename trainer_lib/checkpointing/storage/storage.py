"""This file is what differs between a folder on this machine and one behind a URL; all else is said in paths.

On a disk a state is there once its folder has its name: one rename commits it. An object store has no rename, and a
state is there once its manifest is: it is written last and deleted first.
"""

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from trainer_lib.checkpointing.format.layout import deleted_beside, is_debris
from trainer_lib.filesystem.atomic_files import replace_file, sync
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.filesystem.remote_paths import AnyPath


class Storage(ABC):
    """A folder of states, or of one."""

    @abstractmethod
    def states(self) -> Sequence[AnyPath]:
        """Return the folders in it that are states, or on a disk may be."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of all files in it by name; of a folder that is not there, none."""

    @abstractmethod
    def checksum(self, name: str) -> str:
        """Return the checksum of a file, which is read for it."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file at once: readers see the old one or the new one."""

    @abstractmethod
    def write_with(self, name: str, write: Callable[[AnyPath], object]) -> None:
        """Have `write` write a file at once."""

    @abstractmethod
    def delete_files(self, names: Collection[str]) -> None:
        """Delete files; they may not be there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an `OSError` or a `CheckpointError` unless files can be written there."""

    @abstractmethod
    def rename(self, name: str) -> None:
        """Give the state another name."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the state, and what a deletion of it that was cut short left; it may not be there."""

    @abstractmethod
    def debris(self) -> Sequence[AnyPath]:
        """Return the folders in it that saves and deletions left, if none of these is under way."""

    @abstractmethod
    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete what saves and deletions of states in it left that were cut short: all, or these folders."""

    @abstractmethod
    def local_folder(self) -> Path:
        """Return where files are written that grow: on this machine."""

    @abstractmethod
    def download(self, name: str) -> None:
        """Bring a file that grows to this machine, if it is there."""

    @abstractmethod
    def upload(self) -> None:
        """Bring files that grew to where they belong."""


def storage_of(folder: AnyPath) -> Storage:
    """Return what a folder is kept in."""
    if isinstance(folder, Path):
        return LocalStorage(folder)
    from trainer_lib.checkpointing.storage.remote_storage import RemoteStorage

    return RemoteStorage(folder)


class LocalStorage(Storage):
    """A folder on a disk.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def states(self) -> Sequence[Path]:
        """Return the folders in it."""
        return [path for path in self._folder.iterdir() if path.is_dir()] if self._folder.is_dir() else []

    def sizes(self) -> Mapping[str, int]:
        """Ask the disk for each."""
        paths = [Path(parent, name) for parent, _, names in os.walk(self._folder) for name in names]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}

    def checksum(self, name: str) -> str:
        """Read the file."""
        return checksum_of(self._folder / name)

    def write(self, name: str, data: bytes) -> None:
        """Write beside it, and rename."""
        self.write_with(name, lambda path: path.write_bytes(data))

    def write_with(self, name: str, write: Callable[[AnyPath], object]) -> None:
        """Write beside it, and rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / name, write)

    def delete_files(self, names: Collection[str]) -> None:
        """Delete each."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        sync(self._folder)

    def check_writable(self) -> None:
        """Make the folder and a file in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder):
            return

    def rename(self, name: str) -> None:
        """Rename the folder."""
        self._folder.rename(self._folder.with_name(name))
        sync(self._folder.parent)

    def delete(self) -> None:
        """Rename it first, so that a half-deleted state is never taken for a whole one."""
        gone = deleted_beside(self._folder)
        remove(gone)
        if self._folder.is_dir():
            self._folder.rename(gone)
            remove(gone)

    def debris(self) -> Sequence[Path]:
        """Go by their names."""
        return [path for path in self.states() if is_debris(path.name)]

    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete what has the name of a state that is on its way in or out."""
        for path in self.debris():
            if only is None or path in only:
                remove(path)

    def local_folder(self) -> Path:
        """Return where they belong."""
        return self._folder

    def download(self, name: str) -> None:
        """Leave it: it is here."""
        del name

    def upload(self) -> None:
        """Leave them: they are here."""
        del self


def remove(path: Path) -> None:
    """Remove a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
