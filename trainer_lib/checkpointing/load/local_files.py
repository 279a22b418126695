"""This file is the files of a state on this machine: those on its disk, or copies of what is behind a URL."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.load.verification import check_bytes, damaged, differences, share
from trainer_lib.checkpointing.storage.remote_storage import temporary_folder
from trainer_lib.collectives.agreement import gather_checked
from trainer_lib.filesystem.atomic_files import inside
from trainer_lib.filesystem.checksums import for_each_file
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.process_group import ProcessGroup

_Stamp = list[tuple[str, int, int, int]]


class LocalFiles(ABC):
    """The files of a state.

    Attributes:
        folder: Where they are.
    """

    folder: Path

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Read this process's part of all bytes, and raise if one is not as it was written."""

    @abstractmethod
    def keep(self) -> None:
        """Have the next `local_files` of this state find them checked."""

    @abstractmethod
    def release(self) -> None:
        """Say that no process needs them any more."""


def local_files(folder: AnyPath, group: ProcessGroup, doing: str, reader: int, readers: int) -> LocalFiles:
    """Return the files of a state, to be checked; all processes ask.

    Args:
        folder: The state.
        group: The processes.
        doing: What this is a part of.
        reader: The number of this process among those that share a folder on a disk.
        readers: How many share it.
    """
    if isinstance(folder, RemotePath):
        return _kept.pop(folder, None) or _FetchedFiles.between(folder, group, doing)
    return _FilesOnDisk(folder, reader, readers)


def fetch(folder: RemotePath, names: Collection[str], manifest: Manifest | None, to: Path) -> list[str]:
    """Copy files here, and return what is wrong with those that are not as they were written."""
    return [found for found in for_each_file(lambda name: _fetch(folder, name, manifest, to), names) if found]


# What was just checked in order to be loaded, and how its files looked then.
_checked: dict[Path, _Stamp] = {}
_kept: dict[RemotePath, "_FetchedFiles"] = {}


class _FilesOnDisk(LocalFiles):
    """Files that are here."""

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
        """Leave them where they are."""
        del self


class _FetchedFiles(LocalFiles):
    """Copies of files, one for all processes that see the same disk, each of which fetches a part.

    Args:
        source: Where they are from.
        folder: Where they are put.
        reader: The number of this process among those that put files there.
        readers: How many do.
    """

    def __init__(self, source: RemotePath, folder: Path, reader: int, readers: int) -> None:
        self.folder = folder
        self._source = source
        self._reader, self._readers = reader, readers
        self._fetched: Manifest | None = None

    @classmethod
    def between(cls, source: RemotePath, group: ProcessGroup, doing: str) -> "_FetchedFiles":
        own = temporary_folder()
        # Names are drawn: a process that has a folder of this name sees the disk of the one who made it.
        folders = gather_checked(group, str(own), doing, CheckpointError)
        chosen = next(Path(folder) for folder in folders if Path(folder).is_dir())
        chosen_by_rank = gather_checked(group, str(chosen), doing, CheckpointError)
        together = [rank for rank, folder in enumerate(chosen_by_rank) if folder == str(chosen)]
        if chosen != own:
            own.rmdir()
        return cls(source, chosen, together.index(group.rank), len(together))

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
    target = inside(to, name, MANIFEST_NAME)
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
    found = [(name, (folder / name).stat()) for name in (MANIFEST_NAME, *manifest.files)]
    return [(name, facts.st_ino, facts.st_size, facts.st_mtime_ns) for name, facts in found]
