"""The files of a checkpoint on this machine: its own files on a disk, or copies of files behind a URL."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.load.verification import check_bytes, damaged, differences, share
from trainer_lib.checkpointing.storage.remote_storage import temporary_folder
from trainer_lib.collectives.agreement import gather_checked
from trainer_lib.filesystem.atomic_files import path_inside
from trainer_lib.filesystem.checksums import for_each_file
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.process_group import ProcessGroup

_Stamp = list[tuple[str, int, int, int]]


class LocalFiles(ABC):
    """The files of a checkpoint.

    Attributes:
        folder: Their folder on this machine.
    """

    folder: Path

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Read this rank's share of the bytes, and raise if any of them is wrong."""

    @abstractmethod
    def keep(self) -> None:
        """Let the next `local_files` of this checkpoint skip the check."""

    @abstractmethod
    def release(self) -> None:
        """Delete what was copied; no rank needs the files any more."""


def local_files(folder: AnyPath, group: ProcessGroup, operation: str, reader: int, readers: int) -> LocalFiles:
    """Return the files of a checkpoint, which are still to be checked; all ranks call it.

    Args:
        folder: The checkpoint.
        group: The ranks.
        operation: The call that the user made, for errors.
        reader: The number of this rank among those that share a folder on a disk.
        readers: How many ranks share it.
    """
    if isinstance(folder, RemotePath):
        return _kept.pop(folder, None) or _FetchedFiles.between(folder, group, operation)
    return _FilesOnDisk(folder, reader, readers)


def fetch(folder: RemotePath, names: Collection[str], manifest: Manifest | None, to: Path) -> list[str]:
    """Copy files to this machine, and return what is wrong with each damaged one."""
    complaints = for_each_file(lambda name: _fetch(folder, name, manifest, to), names)
    return [complaint for complaint in complaints if complaint]


# Checkpoints that were checked and will be loaded next, with the stamps of their files.
_checked: dict[Path, _Stamp] = {}
_kept: dict[RemotePath, "_FetchedFiles"] = {}


class _FilesOnDisk(LocalFiles):
    """Files on a disk of this machine."""

    def __init__(self, folder: Path, reader: int, readers: int) -> None:
        self.folder = folder
        self._reader, self._readers = reader, readers
        self._stamp: _Stamp = []

    def check(self, manifest: Manifest) -> None:
        self._stamp = _stamp(self.folder, manifest)
        if _checked.pop(self.folder, None) != self._stamp:
            check_bytes(self.folder, manifest, share(manifest.files, self._reader, self._readers))

    def keep(self) -> None:
        _checked[self.folder] = self._stamp

    def release(self) -> None:
        """Do nothing: the files are the checkpoint itself."""
        del self


class _FetchedFiles(LocalFiles):
    """Copies of files behind a URL: one copy for all ranks that see the same disk, which share the fetching.

    Args:
        source: The checkpoint.
        folder: The folder of the copies.
        reader: The number of this rank among those that fetch into this folder.
        readers: How many ranks do.
    """

    def __init__(self, source: RemotePath, folder: Path, reader: int, readers: int) -> None:
        self.folder = folder
        self._source = source
        self._reader, self._readers = reader, readers
        self._fetched: Manifest | None = None

    @classmethod
    def between(cls, source: RemotePath, group: ProcessGroup, operation: str) -> "_FetchedFiles":
        created = temporary_folder()
        # The names are random: a rank that sees another rank's folder shares a disk with it.
        folders = gather_checked(group, str(created), operation, CheckpointError)
        chosen = next(Path(folder) for folder in folders if Path(folder).is_dir())
        chosen_by_rank = gather_checked(group, str(chosen), operation, CheckpointError)
        sharing = [rank for rank, folder in enumerate(chosen_by_rank) if folder == str(chosen)]
        if chosen != created:
            created.rmdir()
        return cls(source, chosen, sharing.index(group.rank), len(sharing))

    def check(self, manifest: Manifest) -> None:
        if manifest == self._fetched:
            return
        complaints = fetch(self._source, share(manifest.files, self._reader, self._readers), manifest, self.folder)
        if complaints:
            raise damaged(self._source, complaints)
        self._fetched = manifest

    def keep(self) -> None:
        _kept[self._source] = self

    def release(self) -> None:
        if self._reader == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _fetch(folder: RemotePath, name: str, manifest: Manifest | None, to: Path) -> str | None:
    target = path_inside(to, name, MANIFEST_NAME)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        (folder / name).fetch(target)
    except PermissionError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}.") from error
    except FileNotFoundError:
        return f"{name} is missing"
    complaints = [] if manifest is None else differences(to, manifest, [name])
    return complaints[0] if complaints else None


def _stamp(folder: Path, manifest: Manifest) -> _Stamp:
    stats = [(name, (folder / name).stat()) for name in (MANIFEST_NAME, *manifest.files)]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
