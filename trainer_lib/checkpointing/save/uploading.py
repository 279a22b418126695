"""This file is one save to a URL: all processes send their files, and the manifest, sent last, makes them the state.

Nothing is written to the disk here but what hooks write. An older state of the same name is moved beside first
(`layout.replaced_beside`), where loading finds it until the new one is there.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.file_contents import Content

_logger = get_logger(__name__)

_AT_ONCE = 4  # files that a process sends at a time

# Where saves of this process failed: what they sent is deleted once one succeeds.
_debris: set[RemotePath] = set()


def writer_for(target: AnyPath, group: ProcessGroup, leader: int) -> "CheckpointWriter | CheckpointUploader":
    """Return the save of a state to a folder, on a disk or behind a URL.

    Args:
        target: The folder.
        group: The processes.
        leader: The process that makes and renames folders for this one.
    """
    return (
        CheckpointWriter(target, group, leader)
        if isinstance(target, Path)
        else CheckpointUploader(target, group, leader)
    )


class CheckpointUploader:
    """The save of one state to a URL, on all processes.

    Args:
        target: The folder of the state.
        group: The processes.
        leader: The process that sends the manifest.

    Attributes:
        folder: Where hooks of this process write, on this machine.
        finite: What of it is not finite; of all processes after `commit`.
    """

    folder: Path

    def __init__(self, target: RemotePath, group: ProcessGroup, leader: int = 0) -> None:
        self.target = target
        self._storage = RemoteStorage(target)
        self._group = group
        self._leads = group.rank == leader
        self.finite = FiniteCheck()
        self._written: dict[str, str] = {}  # checksums of what was sent from here, by name

    def __enter__(self) -> "CheckpointUploader":
        self.folder = temporary_folder()
        return self

    def switch_group(self, group: ProcessGroup) -> None:
        """Go on in another thread, where the same processes talk in a group of its own."""
        self._group = group

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if error is not None:
            _debris.add(self.target)

    def write(self, files: Mapping[str, Content]) -> None:
        """Send the files of this process, and those that hooks wrote here."""
        by_hooks = {
            path.relative_to(self.folder).as_posix(): FileOnDisk(path)
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        mine = {**by_hooks, **files}
        names_by_rank = gather_checked(self._group, sorted(mine), "save_state", CheckpointError)
        names = {name for names in names_by_rank for name in names}
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                self._make_room(names)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=UPLOAD_THREADS) as pool:
            for name, checksum in zip(mine, pool.map(self._send, mine, mine.values()), strict=True):
                self._written[name] = checksum
                self.finite.check(name, mine[name])

    def commit(self, manifest: Manifest) -> None:
        """Send the manifest, once all processes are through."""
        answers = gather_checked(self._group, (self._written, self.finite), "save_state", CheckpointError)
        reports = [written for written, _ in answers]
        self.finite.merge(finite for _, finite in answers)
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                checksums = _united(reports)
                try:
                    files = self._all_files(checksums)
                    complete = replace(manifest, files=files, versions=library_versions())
                    self._storage.write(MANIFEST_NAME, sealed(complete.content()))
                except (OSError, UnreachableError) as error:
                    raise cannot_send(self.target, error) from error
                _debris.discard(self.target)
                self._clear_up()

    def _send(self, name: str, content: Content) -> str:
        path = self.target / name
        try:
            return with_retries(str(path), lambda: content.write(path))
        except (OSError, UnreachableError) as error:
            raise cannot_send(path, error) from error

    def _make_room(self, names: Collection[str]) -> None:
        """Move an older state of this name beside, delete what is left of a save, and tell what will be here."""
        try:
            found = self._storage.sizes()
            if MANIFEST_NAME in found:
                ours = {*self._older_manifest().files, MANIFEST_NAME}
                aside = replaced_beside(self.target)
                RemoteStorage(aside).delete()
                self._storage.move(aside.name, [name for name in found if name in ours])
            elif PARTIAL_NAME in found:
                self._storage.delete_partial(found)
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
                f"{error} So it is not known which files there a new state of the same name would replace. Move the "
                "folder away, or save under another name."
            ) from error

    def _all_files(self, checksums: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        found = self._storage.sizes()
        missing = sorted(set(checksums) - set(found))
        if missing:
            raise UnwritableError(
                f"{self.target} has no {', '.join(missing[:4])}, which was just written there: the processes do not "
                "write to the same storage, or it loses what it is given."
            )
        return {
            name: {"size": found[name], CHECKSUM: checksum, **self.finite.facts(name)}
            for name, checksum in sorted(checksums.items())
        }

    def _clear_up(self) -> None:
        """Delete what is not needed now that the state is there, and what failed saves left."""
        try:
            self._storage.delete_files([PARTIAL_NAME])
            RemoteStorage(replaced_beside(self.target)).delete()
            while _debris:
                folder = _debris.pop()
                if not is_committed(folder) and PARTIAL_NAME in (found := RemoteStorage(folder).sizes()):
                    RemoteStorage(folder).delete_partial(found)
        except (OSError, UnreachableError) as error:
            _logger.warning("%s is saved, but what it replaces could not be deleted: %s", self.target, error)


@dataclass(frozen=True)
class FileOnDisk(Content):
    """What a file on this machine holds.

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
        """Its bytes."""
        return self.source.stat().st_size


def cannot_send(path: RemotePath, error: Exception) -> UnwritableError:
    """Return the error that tells what could not be written, and that nothing else is lost."""
    told = f"{getattr(error, 'strerror', None) or error}."
    reason = str(error).replace(f"{path} cannot", "it cannot") if isinstance(error, UnreachableError) else told
    return UnwritableError(f"{path} could not be written: {reason} What was saved before is as it was.")


def _united(reports: list[dict[str, str]]) -> dict[str, str]:
    """Return the checksums of what all processes sent."""
    united: dict[str, str] = {}
    for report in reports:
        for name, checksum in report.items():
            if united.setdefault(name, checksum) != checksum:
                raise CheckpointError(
                    f"Two processes wrote a file {name}, each another one: a hook of save_state has to write it on the "
                    "main process alone, or under a name for each process."
                )
    return united
