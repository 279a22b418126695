"""The operations that differ between a checkpoint folder on a disk and one behind a URL.

On a disk, one rename of the folder commits a checkpoint. An object store has no rename: there the manifest commits it,
and is therefore written last and deleted first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

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
    def write_files(self, files: Mapping[str, Callable[[AnyPath], object]]) -> None:
        """Write files that belong together, by name: an index of the others, if there are others, is the last.

        No reader gets some of the files and some older ones of the same names: while they are replaced, there is no
        index.
        """

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
