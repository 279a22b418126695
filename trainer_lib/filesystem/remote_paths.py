"""Paths of URLs (`s3://`, `gs://`, `memory://` …), with the methods of `pathlib.Path`.

They use fsspec, which is imported on the first access.
"""

import errno
import io
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from glob import escape, has_magic
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from trainer_lib.foundation.errors import (
    ConfigurationError,
    MissingPackageError,
    TrainerLibError,
    UnreachableError,
    UnsupportedError,
    unknown,
)
from trainer_lib.foundation.imports import pip_install
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_Result = TypeVar("_Result")

_URL = r"(?s)([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)"
_LOCAL = ("file", "local")
# Seconds between attempts. The file systems retry too, sooner and more often.
PAUSES = (0.5, 2.0)
_PIECE = 64 << 20  # bytes that are passed on at a time, so that no whole file is in memory
_ANSWERS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


@frozen_dataclass
class RemotePath:
    """A file or folder behind a URL, with the methods of `pathlib.Path` that this library needs.

    Folders need not be created: a folder exists if there are files in it.

    Args:
        scheme: The part before `://`.
        key: The part after it.
    """

    scheme: str
    key: str

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.scheme}://{self.key}"

    def __lt__(self, other: "RemotePath") -> bool:
        """Whether it comes before another one when they are sorted."""
        return (self.scheme, self.key) < (other.scheme, other.key)

    # -- names ---------------------------------------------------------------------------------------------------

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.key)

    @property
    def name(self) -> str:
        """The last part."""
        return self._pure.name

    @property
    def suffix(self) -> str:
        """The file extension of the last part."""
        return self._pure.suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder that contains it."""
        return self._at(self._pure.parent)

    def __truediv__(self, name: str | os.PathLike[str]) -> "RemotePath":
        """Return the path of `name` in this folder."""
        return self._at(self._pure / name)

    def with_name(self, name: str) -> "RemotePath":
        """Return the path of `name` beside this one."""
        return self._at(self._pure.with_name(name))

    def is_relative_to(self, folder: "RemotePath") -> bool:
        """Whether it is in a folder, or the folder itself."""
        return self.scheme == folder.scheme and self._pure.is_relative_to(folder._pure)

    def relative_to(self, folder: "RemotePath") -> PurePosixPath:
        """Return its path relative to a folder."""
        return self._pure.relative_to(folder._pure)

    def expanduser(self) -> "RemotePath":
        """Return itself."""
        return self

    def absolute(self) -> "RemotePath":
        """Return itself."""
        return self

    def resolve(self) -> "RemotePath":
        """Return itself."""
        return self

    # -- questions -----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether it is a file, or a folder with files."""
        return bool(self._facts())

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._facts().get("type") == "file"

    def is_dir(self) -> bool:
        """Whether it is a folder with files."""
        return self._facts().get("type") == "directory"

    def stat(self) -> "Facts":
        """Return the size and modification time of a file."""
        facts = self._ask(lambda files, root: dict(files.info(root)))
        return Facts(int(facts.get("size") or 0), _written(facts))

    def iterdir(self) -> Iterator["RemotePath"]:
        """Return the files and folders in a folder."""
        return iter(self._named(lambda files, root: files.ls(root, detail=False)))

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return the files and folders in this folder that match a pattern."""
        return self._named(lambda files, root: files.glob(f"{escape(root.rstrip('/'))}/{pattern}"))

    def rglob(self, pattern: str) -> list["RemotePath"]:
        """Return the files in this folder and its subfolders that match a pattern."""
        return [path for path in map(self.__truediv__, self.sizes()) if path._pure.match(pattern)]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in this folder and its subfolders, by name, from one listing."""

        def list_sizes(files: Any, root: str) -> dict[str, int]:
            entries = files.find(root, detail=True).values()
            sizes = {
                _relative_name(root, entry["name"]): int(entry["size"] or 0) for entry in entries if _is_file(entry)
            }
            return {name: size for name, size in sizes.items() if name}

        return self._ask(list_sizes)

    # -- files ---------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = 0) -> Any:
        """Open a file for reading ("rb") or writing ("wb"); `buffering` is ignored: the file system chooses."""
        del buffering
        files, root = _file_system(str(self))
        if mode == "rb":
            return files.open(root, "rb")
        return _Upload(_in_folder(files, root, lambda: files.open(root, mode)))

    def read_bytes(self) -> bytes:
        """Return the contents of a file."""
        return self._ask(lambda files, root: bytes(files.cat_file(root)))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the contents of a text file."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        """Write a file atomically: readers see the old contents or the new."""
        self._write(lambda files, root: files.pipe_file(root, data))
        return len(data)

    def create(self, data: bytes) -> bool:
        """Write a file unless it exists, by a conditional write; return whether it was written."""
        try:
            self._write(lambda files, root: files.pipe_file(root, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Write a text file atomically."""
        return self.write_bytes(text.encode(encoding))

    def fetch(self, to: Path) -> None:
        """Copy a file to this machine."""
        self._ask(lambda files, root: files.get_file(root, str(to)))

    def put(self, source: Path) -> None:
        """Copy a file from this machine."""
        self._write(lambda files, root: files.put_file(str(source), root))

    def copy(self, to: "RemotePath") -> None:
        """Copy a file, within the storage if it can."""
        target = _file_system(str(to))[1]
        self._ask(lambda files, root: _in_folder(files, target, lambda: files.cp_file(root, target)))

    def replace(self, target: "RemotePath") -> "RemotePath":
        """Rename a file."""
        self.copy(target)
        self.unlink()
        return target

    def delete_files(self, names: Collection[str]) -> None:
        """Delete files in a folder, many per request; missing files are no error."""

        def delete(files: Any, root: str) -> None:
            with suppress(FileNotFoundError):
                files.rm([f"{root}/{name}" for name in plain])

        plain = [name for name in names if not has_magic(f"{self.key}/{name}")]  # fsspec would expand the rest
        if plain:
            self._ask(delete)
        for name in set(names) - set(plain):
            (self / name).unlink(missing_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file."""
        try:
            self._ask(lambda files, root: files.rm_file(root))
        except FileNotFoundError:
            if not missing_ok:
                raise

    # -- private -------------------------------------------------------------------------------------------------

    def _at(self, key: PurePosixPath) -> "RemotePath":
        return RemotePath(self.scheme, str(key))

    def _ask(self, question: Callable[[Any, str], _Result]) -> _Result:
        def asked() -> _Result:
            files, root = _file_system(str(self))
            files.invalidate_cache()  # other ranks and programs write there too
            return question(files, root)

        return with_retries(str(self), asked)

    def _write(self, write: Callable[[Any, str], object]) -> None:
        self._ask(lambda files, root: _in_folder(files, root, lambda: write(files, root)))

    def _facts(self) -> dict[str, Any]:
        """Return the facts of a file or folder; nothing if it does not exist."""
        # fsspec's own `exists` returns False for any error.
        try:
            return self._ask(lambda files, root: dict(files.info(root)))
        except FileNotFoundError:
            return {}

    def _named(self, question: Callable[[Any, str], list[str]]) -> list["RemotePath"]:
        def relative_names(files: Any, root: str) -> list[str]:
            return [_relative_name(root, name) for name in question(files, root)]

        return [self / name for name in sorted(self._ask(relative_names)) if name]


class Facts(NamedTuple):
    """The size and modification time of a file, under the names of `os.stat_result`."""

    st_size: int
    st_mtime: float


AnyPath = Path | RemotePath


def is_url(location: object) -> bool:
    """Whether a location is a URL, other than one of a local file."""
    match = re.match(_URL, location) if isinstance(location, str) else None
    return isinstance(location, RemotePath) or (match is not None and match[1].lower() not in _LOCAL)


def path_at(location: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return the path of a location: on this machine, or behind a URL.

    Raises:
        ConfigurationError: If the URL has a password, a query or `..`, or its scheme is unknown.
        MissingPackageError: If the package for such URLs is not installed.

    Example:
        >>> path_at("file:///tmp/runs"), str(path_at("memory://runs/first") / "run.json")
        (PosixPath('/tmp/runs'), 'memory://runs/first/run.json')
    """
    if isinstance(location, RemotePath):
        return location
    match = re.fullmatch(_URL, os.fspath(location))
    if match is None:
        _refuse_cut_url(Path(location))
        return Path(location).expanduser()
    scheme, rest = match[1].lower(), match[2]
    if scheme in _LOCAL:
        return Path(rest).expanduser()
    url = masked(str(location))
    if re.match(r"[^/@]*:[^/@]*@", rest):
        raise ConfigurationError(
            f"{url} contains a password, and URLs are written to logs and manifests. Remove it, and set the password "
            "in the configuration of the file system or in the environment."
        )
    if "?" in rest:
        raise ConfigurationError(
            f"{url} contains a query after '?', which may be a secret, and URLs are written to logs. Remove it."
        )
    if not rest.strip("/"):
        raise ConfigurationError(f"{url} names no bucket or folder. Give {scheme}://bucket/folder.")
    if ".." in PurePosixPath(rest).parts:
        raise ConfigurationError(f"{url} contains '..', which URLs do not support. Give the full URL.")
    _check_scheme(scheme)
    return RemotePath(scheme, str(PurePosixPath(rest)))


def local_path(location: str | os.PathLike[str] | RemotePath, operation: str) -> Path:
    """Return a path on this machine.

    Raises:
        UnsupportedError: If the location is a URL.
    """
    path = path_at(location)
    if isinstance(path, RemotePath):
        raise UnsupportedError(f"{operation} needs a local path (got the URL {path}). Give a path on this machine.")
    return path


def masked(text: str) -> str:
    """Return a text with the secrets in its URLs masked: users, passwords, and queries such as signatures."""
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1?…", re.sub(r"://[^/\s@]*@", "://…@", text))


def with_retries(url: str, work: Callable[[], _Result]) -> _Result:
    """Call `work`, and retry it after errors that may be temporary.

    Raises:
        OSError: At once, if the file does not exist or access is denied.
        UnreachableError: If every attempt failed, with the URL and the reason.
    """
    for pause in (*PAUSES, None):
        try:
            return work()
        except _ANSWERS as error:
            raise type(error)(error.errno or errno.EIO, _reason(error), url) from error
        except TrainerLibError:
            raise
        except Exception as error:  # each file system raises its own errors
            if "Credential" in type(error).__name__:
                raise PermissionError(errno.EACCES, _reason(error), url) from error
            if pause is None:
                raise UnreachableError(
                    f"{url} cannot be reached, after {len(PAUSES) + 1} attempts: {_reason(error)}."
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


class _Upload:
    """A file that is being written: it exists once it is closed, and an error discards it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), _PIECE):
            self._file.write(view[start : start + _PIECE])
        return len(view)

    def flush(self) -> None:
        """Do nothing: the file system sends parts of the size it chooses."""
        del self

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.close()
        elif hasattr(self._file, "forced"):
            # Otherwise closing it, or the garbage collector, would upload the incomplete file.
            self._file.forced, self._file.closed, self._file.buffer = True, True, io.BytesIO()


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, which it caches in each process, and the path in it."""
    from fsspec.core import url_to_fs

    return cast(tuple[Any, str], url_to_fs(url))


@cache
def _check_scheme(scheme: str) -> None:
    from fsspec import available_protocols, get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        raise ConfigurationError(unknown("kind of URL", scheme, available_protocols())) from error
    except ImportError as error:
        extra = f" or {pip_install('trainer_lib[s3]')}" if scheme in ("s3", "s3a") else ""
        raise MissingPackageError(f"{scheme}:// needs a package that is not installed: {error}{extra}.") from error


def _refuse_cut_url(path: Path) -> None:
    first = path.parts[0] if path.parts else ""
    if len(first) > 2 and first.endswith(":") and len(path.parts) > 1:
        raise ConfigurationError(
            f"{str(path)!r} was a URL before it became a Path, which removes a slash. Give it as a string."
        )


def _relative_name(root: str, name: str) -> str:
    """Return the name of an entry relative to the folder that was listed."""
    return name.strip("/").removeprefix(root.strip("/")).strip("/")


def _in_folder(files: Any, root: str, write: Callable[[], _Result]) -> _Result:
    """Write a file, and create its folder if that is missing, in a file system that has folders.

    The folder is created inside of one that exists, so that a misspelt bucket is not created.
    """
    try:
        return write()
    except FileNotFoundError:
        folders = [str(folder) for folder in PurePosixPath(root).parents if folder.name]
        if not folders or files.isdir(folders[0]) or not any(map(files.isdir, folders[1:])):
            raise
        files.makedirs(folders[0], exist_ok=True)
        return write()


def _is_file(facts: dict[str, Any]) -> bool:
    return facts["type"] == "file" and not facts["name"].endswith("/")  # a name with "/" marks a folder


def _written(facts: dict[str, Any]) -> float:
    modified = next((facts[name] for name in ("LastModified", "mtime", "updated", "created") if name in facts), 0.0)
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0.0)


def _reason(error: BaseException) -> str:
    lines = masked(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
