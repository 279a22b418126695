"""Saving a checkpoint to a disk: all ranks write into a partial folder, and one rename commits it.

A kill at any moment leaves the older checkpoint of the same name where loading finds it: in its folder, or beside it
(`layout.replaced_beside`) between two renames.
"""

import os
import shutil
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    MANIFEST_NAME,
    deleted_beside,
    has_accelerates_layout,
    is_committed,
    is_of_accelerate,
    partial_beside,
    replaced_beside,
)
from trainer_lib.checkpointing.format.manifest import CHECKSUM, Manifest, library_versions, read_manifest, sealed
from trainer_lib.checkpointing.save.nonfinite_check import FiniteCheck
from trainer_lib.checkpointing.storage.storage import remove
from trainer_lib.collectives.agreement import gather_checked, raise_on_all_ranks
from trainer_lib.filesystem.atomic_files import make_folder, sync
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import CheckpointError, TrainerLibError, UnwritableError
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.file_contents import Content


class CheckpointWriter:
    """Saves one checkpoint to a disk, on all ranks.

    Args:
        target: The folder of the checkpoint.
        group: The ranks that save.
        leader: The rank that creates and renames folders for this one: rank 0, or the first rank of its machine.
        keeps_added_files: Whether files that you added to an older folder of this name stay.

    Attributes:
        folder: The partial folder that files are written to.
        finite: The tensors that are not finite; those of all ranks after `commit`.
    """

    def __init__(self, target: Path, group: ProcessGroup, leader: int = 0, keeps_added_files: bool = True) -> None:
        self.target = target
        self._keeps_added_files = keeps_added_files
        self.folder: Path = partial_beside(target)
        self._group = group
        self._leader = leader
        self._leads = group.rank == leader
        self.finite: FiniteCheck = FiniteCheck()
        self._written: dict[str, str] = {}  # the checksums of the files that this rank wrote, by name

    def __enter__(self) -> "CheckpointWriter":
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                try:
                    remove(self.folder)
                    make_folder(self.target.parent)
                    self.folder.mkdir()
                except OSError as error:
                    raise _cannot_write(self.folder, error) from error
        return self

    def switch_group(self, group: ProcessGroup) -> None:
        """Use another group of the same ranks from now on: that of the thread that writes."""
        self._group = group

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, files: Mapping[str, Content]) -> None:
        """Write the files of this rank, and sync them to the disk, each while it is checked and the next is written."""
        size = sum(content.size for content in files.values())
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync") as disk:
            syncs: dict[Path, Future[None] | None] = {}
            for name, content in files.items():
                path = self.folder / name
                with _explained(path, size):
                    path.parent.mkdir(exist_ok=True)
                    self._written[name] = content.write(path)
                    syncs[path] = _sync_beside(disk, path)
                self.finite.check(name, content)
            for path, synced in syncs.items():
                with _explained(path, size):
                    if synced is not None:
                        synced.result()

    def commit(self, manifest: Manifest | None) -> None:
        """Write the manifest and rename the folder, once all ranks have written their files.

        Args:
            manifest: The manifest; `None` for a checkpoint in the layout of another library, which has none.
        """
        reports = gather_checked(self._group, (self._leader, self._written, self.finite), "save_state", CheckpointError)
        written = {
            name: checksum
            for leader, checksums, _ in reports
            if leader == self._leader
            for name, checksum in checksums.items()
        }
        self.finite.merge(finite for *_, finite in reports)
        with raise_on_all_ranks(self._group, "save_state", CheckpointError):
            if self._leads:
                try:
                    self._finish(manifest, written)
                except OSError as error:
                    raise _cannot_write(self.target, error) from error

    def _finish(self, manifest: Manifest | None, written: Mapping[str, str]) -> None:
        files = self._all_files(written)
        self._link_added_files()
        if manifest is not None:
            path = self.folder / MANIFEST_NAME
            path.write_bytes(sealed(replace(manifest, files=files, versions=library_versions()).content()))
            sync(path)
        for folder, _, _ in os.walk(self.folder):
            sync(Path(folder))
        self._swap()

    def _all_files(self, written: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the manifest's entries for all files in the folder, after syncing those that hooks wrote."""
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()):
            name = path.relative_to(self.folder).as_posix()
            checksum = written.get(name)
            if checksum is None:
                sync(path)
                checksum = checksum_of(path)
            files[name] = {"size": path.stat().st_size, CHECKSUM: checksum, **self.finite.facts(name)}
        return files

    def _link_added_files(self) -> None:
        """Keep files that you added to the older folder of this name, such as a tokenizer, by linking them."""
        if not self._keeps_added_files or not self.target.is_dir():
            return
        saved = {*self._older_manifest().files, MANIFEST_NAME} if is_committed(self.target) else set[str]()
        is_of_library = is_of_accelerate if has_accelerates_layout(self.target) else saved.__contains__

        def is_of_older(path: Path) -> bool:
            # A folder of the older shards too: left empty, it would stand for the shards of the new checkpoint.
            if path.is_dir() and not path.is_symlink():
                inside = list(path.iterdir())
                return bool(inside) and all(map(is_of_older, inside))
            name = path.relative_to(self.target).as_posix()
            return name in saved or is_of_library(name) or (path.is_symlink() and os.path.lexists(self.folder / name))

        def ignore(folder: str, names: list[str]) -> set[str]:
            return {name for name in names if is_of_older(Path(folder, name))}

        shutil.copytree(self.target, self.folder, ignore=ignore, copy_function=_link, symlinks=True, dirs_exist_ok=True)

    def _older_manifest(self) -> Manifest:
        try:
            return read_manifest(self.target)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} It is unknown which files a new checkpoint of the same name would replace. Move the folder "
                "away, or save under another name."
            ) from error

    def _swap(self) -> None:
        replaced, deleted = replaced_beside(self.target), deleted_beside(self.target)
        if self.target.exists():
            # An incomplete folder must not overwrite a complete checkpoint that an interrupted rename left beside it.
            aside = replaced if is_committed(self.target) or has_accelerates_layout(self.target) else deleted
            remove(aside)
            self.target.rename(aside)
        self.folder.rename(self.target)
        sync(self.target.parent)
        for older in (replaced, deleted):
            remove(older)


def _link(source: str, target: str) -> None:
    if os.path.lexists(target):
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync_beside(disk: ThreadPoolExecutor, path: Path) -> Future[None] | None:
    try:
        return disk.submit(sync, path)
    except RuntimeError:  # the interpreter is ending
        sync(path)
        return None


@contextmanager
def _explained(path: Path, bytes_needed: int) -> Generator[None]:
    """Name the file that could not be written, and the free space."""
    try:
        yield
    except TrainerLibError:
        raise
    except (OSError, RuntimeError) as error:
        raise _cannot_write(path, error, bytes_needed) from error


def _cannot_write(path: Path, error: Exception, bytes_needed: int | None = None) -> UnwritableError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    free = convert_bytes(_free_bytes(path))
    needs = "" if bytes_needed is None else f" This rank's files need about {convert_bytes(bytes_needed)};"
    return UnwritableError(
        f"{path} could not be written: {reason}.{needs} {free} are free there. Earlier checkpoints are unchanged. "
        "(On several machines without a shared file system, use ProjectConfiguration(save_on_each_node=True).)"
    )


def _free_bytes(path: Path) -> int:
    for folder in (path, *path.parents):
        with suppress(OSError):  # not there, or deleted now
            return shutil.disk_usage(folder).free
    return 0
