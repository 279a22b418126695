"""The storage of a checkpoint folder; this one, on a disk, commits a checkpoint by renaming its folder."""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from trainer_lib.checkpointing.format.layout import deleted_beside, is_debris
from trainer_lib.checkpointing.storage.base import Storage
from trainer_lib.filesystem.atomic_files import make_folder, replace_file, replace_files, sync
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.filesystem.remote_paths import AnyPath


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
        walked = os.walk(self._folder, onerror=_raise_unless_missing)  # which leaves out what it cannot read
        paths = [Path(parent, name) for parent, _, names in walked for name in names]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}

    def checksum(self, name: str) -> str:
        """Read the file."""
        return checksum_of(self._folder / name)

    def write(self, name: str, data: bytes) -> None:
        """Write to a temporary file beside it, and rename that."""
        make_folder(self._folder)
        replace_file(self._folder / name, lambda path: path.write_bytes(data))

    def write_files(self, files: Mapping[str, Callable[[AnyPath], object]]) -> None:
        """Write temporary files beside them, and rename these once all are on the disk."""
        make_folder(self._folder)
        replace_files({self._folder / name: write for name, write in files.items()})

    def delete_files(self, names: Collection[str]) -> None:
        """Delete each file."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        sync(self._folder)

    def check_writable(self) -> None:
        """Create the folder, and a temporary file in it."""
        make_folder(self._folder)
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


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def remove(path: Path) -> None:
    """Remove a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
