"""A folder behind a URL, where the manifest commits a checkpoint."""

import functools
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.storage.base import Storage
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, with_retries

# Lists the files that a running save will upload. A folder that has it and no manifest is an unfinished save.
PARTIAL_NAME = "partial.json"

_uploaded: dict[Path, tuple[int, int]] = {}  # size and time of local files when they were last uploaded


class RemoteStorage(Storage):
    """A folder behind a URL.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder

    def states(self) -> Sequence[RemotePath]:
        """Return the subfolders that have a manifest."""
        return [self._folder / name for name, files in self._folders().items() if MANIFEST_NAME in files]

    def sizes(self) -> Mapping[str, int]:
        """List all files by one request."""
        return self._folder.sizes()

    def checksum(self, name: str) -> str:
        """Read the file without storing it."""
        path = self._folder / name
        return with_retries(str(path), lambda: checksum_of(path))

    def write(self, name: str, data: bytes) -> None:
        """Write the object, which is atomic."""
        (self._folder / name).write_bytes(data)

    def write_files(self, files: Mapping[str, Callable[[AnyPath], object]]) -> None:
        """Write each file, and retry if that fails; an index that names some of them is deleted first."""
        *others, last = files
        if not self.sizes().keys().isdisjoint(others):
            self.delete_files([last])
        for name, write in files.items():
            path = self._folder / name
            with_retries(str(path), functools.partial(write, path))

    def check_writable(self) -> None:
        """Write a file and delete it."""
        probe = self._folder / f".probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()

    def rename(self, name: str) -> None:
        """Copy all files within the storage, the manifest last, then delete the originals, the manifest first."""
        self.move(name, self.sizes())
        self.delete()

    def move(self, name: str, files: Collection[str]) -> None:
        """Move some files to a folder beside this one: the manifest is copied last and deleted first."""
        target = self._folder.with_name(name)
        for file in sorted(files, key=lambda file: file == MANIFEST_NAME):
            (self._folder / file).copy(target / file)
        self.delete_files(files)

    def delete(self) -> None:
        """Delete the checkpoint, the manifest first, so that an interrupted deletion leaves an unfinished save."""
        if present := self.sizes():
            self.write(PARTIAL_NAME, json.dumps(sorted(present)).encode())
            self.delete_files(present)
            self.delete_files([PARTIAL_NAME])

    def delete_files(self, names: Collection[str]) -> None:
        """Delete some files, the manifest first; missing files are no error."""
        self._folder.delete_files([name for name in names if name == MANIFEST_NAME])
        self._folder.delete_files([name for name in names if name != MANIFEST_NAME])

    def debris(self) -> Sequence[RemotePath]:
        """Return the subfolders with `partial.json` and without a manifest."""
        return self._debris(self._folders())

    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete the files of unfinished saves and deletions."""
        folders = self._folders()
        for path in self._debris(folders):
            if only is None or path in only:
                RemoteStorage(path).delete_partial(folders[path.name])

    def delete_partial(self, present: Collection[str]) -> None:
        """Delete the files of an unfinished save, of those present; files that you added stay."""
        listed: Any = json.loads((self._folder / PARTIAL_NAME).read_bytes())
        self.delete_files([name for name in present if name in listed and name != PARTIAL_NAME])
        self.delete_files([PARTIAL_NAME])

    def local_folder(self) -> Path:
        """Return a temporary folder of this process."""
        return _local_folder(self._folder)

    def download(self, name: str) -> None:
        """Copy the file to the local folder, if it exists."""
        if (self._folder / name).is_file():
            (self._folder / name).fetch(self.local_folder() / name)

    def upload(self) -> None:
        """Upload the files that changed since the last upload."""
        folder = self.local_folder()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
            if _uploaded.get(path) != stamp:
                (self._folder / path.relative_to(folder)).put(path)
                _uploaded[path] = stamp

    def _debris(self, folders: Mapping[str, Collection[str]]) -> list[RemotePath]:
        return [self._folder / name for name, files in folders.items() if _is_partial(files)]

    def _folders(self) -> dict[str, list[str]]:
        """Return the files in each subfolder, by the name of the subfolder."""
        folders: dict[str, list[str]] = {}
        for name in self.sizes():
            first, _, rest = name.partition("/")
            if rest:
                folders.setdefault(first, []).append(rest)
        return folders


def _is_partial(files: Collection[str]) -> bool:
    return PARTIAL_NAME in files and MANIFEST_NAME not in files


def temporary_folder() -> Path:
    """Return a new temporary folder, which is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="trainer_lib-"))
    # Not atexit, which a forked process does not run; a forked process does not run its parent's finalizers either.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    return folder


@functools.cache
def _local_folder(folder: RemotePath) -> Path:
    del folder  # the key of the cache
    return temporary_folder()
