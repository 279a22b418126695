"""This file is a folder behind a URL, where a state is there once its manifest is."""

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
from trainer_lib.checkpointing.storage.storage import Storage
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, with_retries

# In a folder while a state is written there: which files that will be. What has one and no manifest is debris.
PARTIAL_NAME = "partial.json"

_put_up: dict[Path, tuple[int, int]] = {}  # how files that grow looked when they were put up


class RemoteStorage(Storage):
    """A folder behind a URL.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder

    def states(self) -> Sequence[RemotePath]:
        """Return the folders in it that have a manifest."""
        return [self._folder / name for name, files in self._folders().items() if MANIFEST_NAME in files]

    def sizes(self) -> Mapping[str, int]:
        """Ask once for all of them."""
        return self._folder.sizes()

    def checksum(self, name: str) -> str:
        """Read the file, of which nothing is kept."""
        path = self._folder / name
        return with_retries(str(path), lambda: checksum_of(path))

    def write(self, name: str, data: bytes) -> None:
        """Write it: an object is there as a whole."""
        (self._folder / name).write_bytes(data)

    def write_with(self, name: str, write: Callable[[AnyPath], object]) -> None:
        """Have it written, again if that fails."""
        path = self._folder / name
        with_retries(str(path), lambda: write(path))

    def check_writable(self) -> None:
        """Write a file and delete it."""
        probe = self._folder / f".probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()

    def rename(self, name: str) -> None:
        """Copy all files on the other side, the manifest last, and delete them here, the manifest first."""
        self.move(name, self.sizes())
        self.delete()

    def move(self, name: str, files: Collection[str]) -> None:
        """Rename some of its files to the same names in a folder beside it, the manifest last and first."""
        target = self._folder.with_name(name)
        for one in sorted(files, key=lambda one: one == MANIFEST_NAME):
            (self._folder / one).copy(target / one)
        self.delete_files(files)

    def delete(self) -> None:
        """Delete the manifest first: what is left is no state, and known as debris if this is cut short."""
        if found := self.sizes():
            self.write(PARTIAL_NAME, json.dumps(sorted(found)).encode())
            self.delete_files(found)
            self.delete_files([PARTIAL_NAME])

    def delete_files(self, names: Collection[str]) -> None:
        """Delete some of its files, the manifest first; they may not be there."""
        self._folder.delete_files([name for name in names if name == MANIFEST_NAME])
        self._folder.delete_files([name for name in names if name != MANIFEST_NAME])

    def debris(self) -> Sequence[RemotePath]:
        """Return those that say what was to be written, and have no manifest."""
        return self._debris(self._folders())

    def delete_debris(self, only: Collection[AnyPath] | None = None) -> None:
        """Delete what was written of states that never came to be."""
        folders = self._folders()
        for path in self._debris(folders):
            if only is None or path in only:
                RemoteStorage(path).delete_partial(folders[path.name])

    def delete_partial(self, found: Collection[str]) -> None:
        """Delete what a save that was cut short wrote, of the files that are there; other people's stay."""
        told: Any = json.loads((self._folder / PARTIAL_NAME).read_bytes())
        self.delete_files([name for name in found if name in told and name != PARTIAL_NAME])
        self.delete_files([PARTIAL_NAME])

    def local_folder(self) -> Path:
        """Return a folder of this process's own."""
        return _growing(self._folder)

    def download(self, name: str) -> None:
        """Fetch it, if it is there."""
        if (self._folder / name).is_file():
            (self._folder / name).fetch(self.local_folder() / name)

    def upload(self) -> None:
        """Put those there that changed since the last time."""
        here = self.local_folder()
        for path in sorted(path for path in here.rglob("*") if path.is_file()):
            facts = path.stat()
            stamp = (facts.st_size, facts.st_mtime_ns)
            if _put_up.get(path) != stamp:
                (self._folder / path.relative_to(here)).put(path)
                _put_up[path] = stamp

    def _debris(self, folders: Mapping[str, Collection[str]]) -> list[RemotePath]:
        return [self._folder / name for name, files in folders.items() if _is_partial(files)]

    def _folders(self) -> dict[str, list[str]]:
        """Return the folders in this one by name, and the files in each."""
        folders: dict[str, list[str]] = {}
        for name in self.sizes():
            first, _, rest = name.partition("/")
            if rest:
                folders.setdefault(first, []).append(rest)
        return folders


def _is_partial(files: Collection[str]) -> bool:
    return PARTIAL_NAME in files and MANIFEST_NAME not in files


def temporary_folder() -> Path:
    """Return a folder of this process, which goes with it at the latest."""
    folder = Path(tempfile.mkdtemp(prefix="trainer_lib-"))
    # Forked processes run these functions only, and none of the process that they are a fork of.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    return folder


@functools.cache
def _growing(folder: RemotePath) -> Path:
    del folder  # each has its own
    return temporary_folder()
