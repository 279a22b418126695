"""Saving a checkpoint to a URL: all ranks upload their files, and the manifest, uploaded last, commits them.

Only files that hooks write touch the local disk. An older checkpoint of the same name is first moved beside
(`layout.replaced_beside`), where loading finds it until the new one is complete.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME, is_committed, replaced_beside
from trainer_lib.checkpointing.format.manifest import CHECKSUM, Manifest, library_versions, read_manifest, sealed
from trainer_lib.checkpointing.save.background import UPLOAD_THREADS
from trainer_lib.checkpointing.save.nonfinite_check import FiniteCheck
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.storage.remote_storage import PARTIAL_NAME, RemoteStorage, temporary_folder
from trainer_lib.collectives.agreement import gather_checked, raise_on_all_ranks
from trainer_lib.filesystem.checksums import ChecksummedFile
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, with_retries
from trainer_lib.foundation.errors import CheckpointError, UnreachableError, UnwritableError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.file_contents import Content

_logger = get_logger(__name__)

_AT_ONCE = 4  # files that a rank uploads at a time

# The folders of failed saves of this process: the next save that succeeds deletes what they uploaded.
_debris: set[RemotePath] = set()


def writer_for(target: AnyPath, group: ProcessGroup, leader: int) -> "CheckpointWriter | CheckpointUploader":
    """Return the writer of a checkpoint to a folder, on a disk or behind a URL.

    Args:
        target: The folder of the checkpoint.
        group: The ranks that save.
        leader: The rank that creates and renames folders for this one.
    """
    return (
        CheckpointWriter(target, group, leader)
        if isinstance(target, Path)
        else CheckpointUploader(target, group, leader)
    )


class CheckpointUploader:
    """Saves one checkpoint to a URL, on all ranks.

    Args:
        target: The folder of the checkpoint.
        group: The ranks that save.
        leader: The rank that uploads the manifest.

    Attributes:
        folder: The local folder that hooks of this rank write to.
        finite: The tensors that are not finite; those of all ranks after `commit`.
    """

    folder: Path

    def __init__(self, target: RemotePath, group: ProcessGroup, leader: int = 0) -> None:
        self.target = target
        self._storage = RemoteStorage(target)
        self._group = group
        self._leads = group.rank == leader
        self.finite: FiniteCheck = FiniteCheck()
        self._written: dict[str, str] = {}  # the checksums of the files that this rank uploaded, by name

    def __enter__(self) -> "CheckpointUploader":
        self.folder = temporary_folder()
        return self

    def switch_group(self, group: ProcessGroup) -> None:
        """Use another group of the same ranks from now on: that of the thread that writes."""
        self._group = group

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if error is not None:
            _debris.add(self.target)

    def write(self, files: Mapping[str, Content]) -> None:
        """Upload the files of this rank, and those that its hooks wrote."""
        by_hooks = {
            path.relative_to(self.folder).as_posix(): FileOnDisk(path)
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        all_files = {**by_hooks, **files}
        names_by_rank = gather_checked(self._group, sorted(all_files), "save_state", CheckpointError)
        names = {name for names in names_by_rank for name in names}
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                self._prepare_target(names)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=UPLOAD_THREADS) as pool:
            for name, checksum in zip(all_files, pool.map(self.send, all_files, all_files.values()), strict=True):
                self._written[name] = checksum
                self.finite.check(name, all_files[name])

    def commit(self, manifest: Manifest) -> None:
        """Upload the manifest once all ranks have uploaded their files."""
        answers = gather_checked(self._group, (self._written, self.finite), "save_state", CheckpointError)
        reports = [written for written, _ in answers]
        self.finite.merge(finite for _, finite in answers)
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                checksums = _merged(reports)
                try:
                    files = self._all_files(checksums)
                    complete = replace(manifest, files=files, versions=library_versions())
                    self._storage.write(MANIFEST_NAME, sealed(complete.content()))
                except (OSError, UnreachableError) as error:
                    raise cannot_send(self.target, error) from error
                _debris.discard(self.target)
                self._clear_up()

    def send(self, name: str, content: Content) -> str:
        """Write a file to its place, and return its checksum."""
        path = self.target / name
        try:
            return with_retries(str(path), lambda: content.write(path))
        except (OSError, UnreachableError) as error:
            raise cannot_send(path, error) from error

    def _prepare_target(self, names: Collection[str]) -> None:
        """Move an older checkpoint of this name beside, delete what a failed save left, and list what will come."""
        try:
            present = self._storage.sizes()
            if MANIFEST_NAME in present:
                older = {*self._older_manifest().files, MANIFEST_NAME}
                replaced = replaced_beside(self.target)
                RemoteStorage(replaced).delete()
                self._storage.move(replaced.name, [name for name in present if name in older])
            elif PARTIAL_NAME in present:
                self._storage.delete_partial(present)
            self._storage.write(PARTIAL_NAME, json.dumps(sorted(names)).encode())
        except (OSError, UnreachableError) as error:
            raise cannot_send(self.target, error) from error

    def _older_manifest(self) -> Manifest:
        try:
            return read_manifest(self.target)
        except UnreachableError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} It is unknown which files a new checkpoint of the same name would replace. Move the folder "
                "away, or save under another name."
            ) from error

    def _all_files(self, checksums: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        present = self._storage.sizes()
        missing = sorted(set(checksums) - set(present))
        if missing:
            raise UnwritableError(
                f"{self.target} has no {', '.join(missing[:4])}, which was just written there: the ranks write to "
                "different storages, or the storage loses files. Give all ranks the same URL and endpoint."
            )
        return {
            name: {"size": present[name], CHECKSUM: checksum, **self.finite.facts(name)}
            for name, checksum in sorted(checksums.items())
        }

    def _clear_up(self) -> None:
        """Delete the checkpoint that this one replaces, and what failed saves left."""
        try:
            self._storage.delete_files([PARTIAL_NAME])
            RemoteStorage(replaced_beside(self.target)).delete()
            while _debris:
                folder = _debris.pop()
                if not is_committed(folder) and PARTIAL_NAME in (present := RemoteStorage(folder).sizes()):
                    RemoteStorage(folder).delete_partial(present)
        except (OSError, UnreachableError) as error:
            _logger.warning("%s is saved, but the files it replaces could not be deleted: %s", self.target, error)


@frozen_dataclass
class FileOnDisk(Content):
    """The contents of a file on this machine.

    Args:
        source: The file.
    """

    source: Path

    def write(self, path: AnyPath) -> str:
        """Copy the file."""
        with self.source.open("rb") as source, ChecksummedFile(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return file.checksum

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.source.stat().st_size


def cannot_send(path: RemotePath, error: Exception) -> UnwritableError:
    """Return the error for a file that could not be uploaded."""
    message = f"{getattr(error, 'strerror', None) or error}."
    reason = str(error).replace(f"{path} cannot", "it cannot") if isinstance(error, UnreachableError) else message
    return UnwritableError(f"{path} could not be written: {reason} Earlier checkpoints are unchanged.")


def _merged(reports: list[dict[str, str]]) -> dict[str, str]:
    """Return the checksums of the files that all ranks uploaded."""
    merged: dict[str, str] = {}
    for report in reports:
        for name, checksum in report.items():
            if merged.setdefault(name, checksum) != checksum:
                raise CheckpointError(
                    f"Two ranks wrote different contents to the file {name}. Have the hook of save_state write it on "
                    "the main process only, or under a different name on each rank."
                )
    return merged
