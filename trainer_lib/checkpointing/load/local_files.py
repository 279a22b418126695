"""The files of a checkpoint on this machine: its own files on a disk, or copies of files behind a URL."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.load.verification import check_bytes, damaged, differences, share
from trainer_lib.checkpointing.storage.remote_storage import temporary_folder
from trainer_lib.collectives.agreement import gather_checked
from trainer_lib.filesystem.atomic_files import path_inside
from trainer_lib.filesystem.checksums import checksum_of, for_each_file
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.load_tensors import load_tensors, load_with_checksum

_MOST_OF_MEMORY = 0.5  # of what is available, for tensors that were read to be checked

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
        """Drop what was copied or read; no rank needs the files any more."""

    def load(self, path: Path, device: str) -> dict[str, Tensor]:
        """Read one of the files, which holds tensors."""
        return load_tensors(path, device)


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
    return _FilesOnDisk(folder, reader, readers, group.size // readers)


def fetch(folder: RemotePath, names: Collection[str], manifest: Manifest | None, to: Path) -> list[str]:
    """Copy files to this machine, and return what is wrong with each damaged one."""
    complaints = for_each_file(lambda name: _fetch(folder, name, manifest, to), names)
    return [complaint for complaint in complaints if complaint]


# Checkpoints that were checked and will be loaded next: the stamps of their files, and the tensors that were read.
_checked: dict[Path, tuple[_Stamp, dict[Path, dict[str, Tensor]]]] = {}
_kept: dict[RemotePath, "_FetchedFiles"] = {}


def forget_checked() -> None:
    """Drop the tensors of checkpoints that were checked, and were not loaded after all."""
    _checked.clear()


class _FilesOnDisk(LocalFiles):
    """Files on a disk of this machine. Tensors that were read to be checked are not read again, if memory allows it.

    Args:
        folder: Their folder.
        reader: The number of this rank among those that share the reading.
        readers: How many ranks share it.
        times: How often the whole checkpoint is read.
    """

    def __init__(self, folder: Path, reader: int, readers: int, times: int) -> None:
        self.folder = folder
        self._reader, self._readers, self._times = reader, readers, times
        self._stamp: _Stamp = []
        self._tensors: dict[Path, dict[str, Tensor]] = {}  # by file
        self._may_keep = False

    def check(self, manifest: Manifest) -> None:
        self._stamp = _stamp(self.folder, manifest)
        stamp, self._tensors = _checked.pop(self.folder, (None, {}))
        if stamp == self._stamp:
            return
        import psutil

        self._tensors = {}
        size = sum(facts["size"] for facts in manifest.files.values()) * self._times  # of all ranks together
        self._may_keep = size <= psutil.virtual_memory().available * _MOST_OF_MEMORY
        check_bytes(self.folder, manifest, share(manifest.files, self._reader, self._readers), self._checksum)

    def load(self, path: Path, device: str) -> dict[str, Tensor]:
        tensors = self._tensors.pop(path, None)
        if tensors is None:
            return super().load(path, device)
        moved = {id(tensor): tensor.to(device) for tensor in tensors.values()}  # some have several names
        return {name: moved[id(tensor)] for name, tensor in tensors.items()}

    def keep(self) -> None:
        _checked[self.folder] = self._stamp, self._tensors

    def release(self) -> None:
        """Drop the tensors; the files are the checkpoint itself."""
        self._tensors = {}

    def _checksum(self, name: str) -> str:
        path = self.folder / name
        if self._may_keep and path.suffix == ".safetensors" and path.parent == self.folder:  # not a rank's shards
            with suppress(CheckpointError):  # a damaged header
                self._tensors[path], checksum = load_with_checksum(path)
                return checksum
        return checksum_of(path)


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
