"""The operations that differ between a checkpoint folder on a disk and one behind a URL.

On a disk, one rename of the folder commits a checkpoint. An object store has no rename: there the manifest commits it,
and is therefore written last and deleted first.
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
    """A checkpoint folder, or a folder of checkpoints."""

    @abstractmethod
    def states(self) -> Sequence[AnyPath]:
        """Return the subfolders that are checkpoints; on a disk all subfolders, which may be damaged checkpoints."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of all files in it by name; nothing for a missing folder."""

    @abstractmethod
    def checksum(self, name: str) -> str:
        """Read a file and return its checksum."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: readers see the old contents or the new."""

    @abstractmethod
    def write_with(self, name: str, write: Callable[[AnyPath], object]) -> None:
        """Write a file atomically with `write`."""

    @abstractmethod
    def delete_files(self, names: Collection[str]) -> None:
        """Delete files; missing files are no error."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an `OSError` or a `CheckpointError` unless files can be written to it."""

    @abstractmethod
    def rename(self, name: str) -> None:
        """Rename the checkpoint."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the checkpoint if it exists, and what an interrupted deletion of it left."""

    @abstractmethod
    def debris(self) -> Sequence[AnyPath]:
        """Return the subfolders of interrupted saves and deletions, and of those that are running."""

    @abstractmethod
    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete the subfolders of interrupted saves and deletions: all of them, or only these."""

    @abstractmethod
    def local_folder(self) -> Path:
        """Return the local folder for files that are appended to, such as logs."""

    @abstractmethod
    def download(self, name: str) -> None:
        """Copy a file to the local folder, if it exists."""

    @abstractmethod
    def upload(self) -> None:
        """Copy the files of the local folder back."""


def storage_of(folder: AnyPath) -> Storage:
    """Return the storage of a folder."""
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
        """Return the subfolders."""
        return [path for path in self._folder.iterdir() if path.is_dir()] if self._folder.is_dir() else []

    def sizes(self) -> Mapping[str, int]:
        """Ask the disk for each file."""
        paths = [Path(parent, name) for parent, _, names in os.walk(self._folder) for name in names]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}

    def checksum(self, name: str) -> str:
        """Read the file."""
        return checksum_of(self._folder / name)

    def write(self, name: str, data: bytes) -> None:
        """Write to a temporary file beside it, and rename that."""
        self.write_with(name, lambda path: path.write_bytes(data))

    def write_with(self, name: str, write: Callable[[AnyPath], object]) -> None:
        """Write to a temporary file beside it, and rename that."""
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / name, write)

    def delete_files(self, names: Collection[str]) -> None:
        """Delete each file."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        sync(self._folder)

    def check_writable(self) -> None:
        """Create the folder, and a temporary file in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder):
            return

    def rename(self, name: str) -> None:
        """Rename the folder."""
        self._folder.rename(self._folder.with_name(name))
        sync(self._folder.parent)

    def delete(self) -> None:
        """Rename the folder first, so that a half-deleted checkpoint never looks complete."""
        renamed = deleted_beside(self._folder)
        remove(renamed)
        if self._folder.is_dir():
            self._folder.rename(renamed)
            remove(renamed)

    def debris(self) -> Sequence[Path]:
        """Recognize them by their names."""
        return [path for path in self.states() if is_debris(path.name)]

    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete the folders with the name of an unfinished save or deletion."""
        for path in self.debris():
            if only is None or path in only:
                remove(path)

    def local_folder(self) -> Path:
        """Return the folder itself."""
        return self._folder

    def download(self, name: str) -> None:
        """Do nothing: the file is local."""
        del name

    def upload(self) -> None:
        """Do nothing: the files are local."""
        del self


def remove(path: Path) -> None:
    """Remove a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
