"""This file is paths on other machines, given by URL (`s3://`, `gs://`, `memory://` …), with the verbs of `pathlib`.

What is behind them is fsspec's, which is imported with the first question that is asked of one.
"""

import errno
import io
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
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

_Result = TypeVar("_Result")

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
# Seconds between attempts; the file systems themselves try again too, sooner and more often.
PAUSES = (0.5, 2.0)
_PIECE = 64 << 20  # bytes that are handed over at a time, so that no file is in memory as a whole
_ANSWERS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder on another machine, as far as it is used here like a `pathlib.Path`.

    Folders need not be made: there is one where there are files.

    Args:
        scheme: What stands before `://`.
        key: What stands after it.
    """

    scheme: str
    key: str

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.scheme}://{self.key}"

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
        """The ending of the last part."""
        return self._pure.suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return self._at(self._pure.parent)

    def __truediv__(self, name: str | os.PathLike[str]) -> "RemotePath":
        """Return what is called so in this folder."""
        return self._at(self._pure / name)

    def with_name(self, name: str) -> "RemotePath":
        """Return what is called so beside this."""
        return self._at(self._pure.with_name(name))

    def is_relative_to(self, folder: "RemotePath") -> bool:
        """Whether it is in a folder, or the folder itself."""
        return self.scheme == folder.scheme and self._pure.is_relative_to(folder._pure)

    def relative_to(self, folder: "RemotePath") -> PurePosixPath:
        """Return its name as seen from a folder."""
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
        """Whether there is a file, or a folder with files."""
        return bool(self._facts())

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._facts().get("type") == "file"

    def is_dir(self) -> bool:
        """Whether it is a folder with files."""
        return self._facts().get("type") == "directory"

    def stat(self) -> "Facts":
        """Return size and time of a file."""
        facts = self._ask(lambda files, root: dict(files.info(root)))
        return Facts(int(facts.get("size") or 0), _written(facts))

    def iterdir(self) -> Iterator["RemotePath"]:
        """Return what is in a folder."""
        return iter(self._named(lambda files, root: files.ls(root, detail=False)))

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return what is called so in a folder."""
        return self._named(lambda files, root: files.glob(f"{root.rstrip('/')}/{pattern}"))

    def rglob(self, pattern: str) -> list["RemotePath"]:
        """Return the files in a folder and those in it that are called so."""
        return [path for path in map(self.__truediv__, self.sizes()) if path._pure.match(pattern)]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in a folder and those in it, by name; one question, however many there are."""

        def found(files: Any, root: str) -> dict[str, int]:
            there = files.find(root, detail=True).values()
            sizes = {_inside(root, facts["name"]): int(facts["size"] or 0) for facts in there if _is_file(facts)}
            return {name: size for name, size in sizes.items() if name}

        return self._ask(found)

    # -- files ---------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = 0) -> Any:
        """Open a file, for reading ("rb") or to be written anew ("wb"); `buffering` is the file system's."""
        del buffering
        files, root = _file_system(str(self))
        return files.open(root, "rb") if mode == "rb" else _Upload(files.open(root, mode))

    def read_bytes(self) -> bytes:
        """Return what is in a file."""
        return self._ask(lambda files, root: bytes(files.cat_file(root)))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return what is in a file."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        """Write a file, at once: readers see the old one or the new one."""
        self._ask(lambda files, root: files.pipe_file(root, data))
        return len(data)

    def create(self, data: bytes) -> bool:
        """Write a file unless there is one, by a conditional write; return whether it was written."""
        try:
            self._ask(lambda files, root: files.pipe_file(root, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Write a file, at once."""
        return self.write_bytes(text.encode(encoding))

    def fetch(self, to: Path) -> None:
        """Copy a file to this machine."""
        self._ask(lambda files, root: files.get_file(root, str(to)))

    def put(self, source: Path) -> None:
        """Copy a file from this machine."""
        self._ask(lambda files, root: files.put_file(str(source), root))

    def copy(self, to: "RemotePath") -> None:
        """Copy a file, on the other side where that can be done."""
        self._ask(lambda files, root: files.cp_file(root, _file_system(str(to))[1]))

    def replace(self, target: "RemotePath") -> "RemotePath":
        """Give a file another name."""
        self.copy(target)
        self.unlink()
        return target

    def delete_files(self, names: Collection[str]) -> None:
        """Delete files in a folder, many at once; they may not be there."""

        def delete(files: Any, root: str) -> None:
            with suppress(FileNotFoundError):
                files.rm([f"{root}/{name}" for name in plain])

        plain = [name for name in names if not any(letter in name for letter in "*?[")]  # which fsspec would look for
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
            files.invalidate_cache()  # others write there too
            return question(files, root)

        return with_retries(str(self), asked)

    def _facts(self) -> dict[str, Any]:
        """Return what is known of it; nothing if it is not there."""
        # fsspec's own `exists` takes any error for a no.
        try:
            return self._ask(lambda files, root: dict(files.info(root)))
        except FileNotFoundError:
            return {}

    def _named(self, question: Callable[[Any, str], list[str]]) -> list["RemotePath"]:
        def found(files: Any, root: str) -> list[str]:
            return [_inside(root, name) for name in question(files, root)]

        return [self / name for name in sorted(self._ask(found)) if name]


class Facts(NamedTuple):
    """What is known of a file, by the names of `os.stat_result`."""

    st_size: int
    st_mtime: float


AnyPath = Path | RemotePath


def is_url(given: object) -> bool:
    """Whether this is a URL of another machine."""
    found = _URL.match(given) if isinstance(given, str) else None
    return isinstance(given, RemotePath) or (found is not None and found[1].lower() not in _LOCAL)


def path_at(given: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return the path that a text means: on this machine, or behind a URL.

    Raises:
        ConfigurationError: If it is a URL that cannot be taken.
        MissingPackageError: If the package for such URLs is not installed.

    Example:
        >>> path_at("file:///tmp/runs"), str(path_at("memory://runs/first") / "run.json")
        (PosixPath('/tmp/runs'), 'memory://runs/first/run.json')
    """
    if isinstance(given, RemotePath):
        return given
    found = _URL.fullmatch(os.fspath(given))
    if found is None:
        _refuse_cut_url(Path(given))
        return Path(given).expanduser()
    scheme, rest = found[1].lower(), found[2]
    if scheme in _LOCAL:
        return Path(rest).expanduser()
    url = masked(str(given))
    if re.match(r"[^/@]*:[^/@]*@", rest):
        raise ConfigurationError(
            f"{url} has a password in it, and URLs get into logs and manifests. Leave it out, and give it as the file "
            "system takes it: in its configuration or the environment."
        )
    if "?" in rest:
        raise ConfigurationError(
            f"{url}: what stands behind a '?' may be a secret, and URLs get into logs. Leave it out."
        )
    if not rest.strip("/"):
        raise ConfigurationError(f"{url} names no bucket or folder. Give {scheme}://bucket/folder.")
    if ".." in PurePosixPath(rest).parts:
        raise ConfigurationError(f"{url}: behind a URL there is no '..'. Give the whole one.")
    _check_scheme(scheme)
    return RemotePath(scheme, str(PurePosixPath(rest)))


def local_path(given: str | os.PathLike[str] | RemotePath, doing: str) -> Path:
    """Return a path on this machine.

    Raises:
        UnsupportedError: If it is behind a URL.
    """
    path = path_at(given)
    if isinstance(path, RemotePath):
        raise UnsupportedError(f"{doing} writes to this machine, and {path} is another one. Give a path here.")
    return path


def masked(text: str) -> str:
    """Return a text without what URLs in it may keep secret: users, passwords, and signatures behind a `?`."""
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1?…", re.sub(r"://[^/\s@]*@", "://…@", text))


def with_retries(url: str, work: Callable[[], _Result]) -> _Result:
    """Do something, again if it fails in a way that may pass, and tell of a failure by the URL and the reason.

    Raises:
        OSError: If it is not there or not allowed; at once.
        UnreachableError: If it failed each time.
    """
    for pause in (*PAUSES, None):
        try:
            return work()
        except _ANSWERS as error:
            raise type(error)(error.errno or errno.EIO, _reason(error), url) from error
        except TrainerLibError:
            raise
        except Exception as error:  # each file system has errors of its own
            if "Credential" in type(error).__name__:
                raise PermissionError(errno.EACCES, _reason(error), url) from error
            if pause is None:
                raise UnreachableError(
                    f"{url} cannot be reached, in {len(PAUSES) + 1} attempts: {_reason(error)}."
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


class _Upload:
    """A file that is being written; it is there once it is closed, and what an error cut short is dropped."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), _PIECE):
            self._file.write(view[start : start + _PIECE])
        return len(view)

    def flush(self) -> None:
        """Leave it to the file system, which sends parts of a size of its own."""
        del self

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.close()
        elif hasattr(self._file, "forced"):
            # Closing it, or the garbage collector, would send the rest of what is torn.
            self._file.forced, self._file.closed, self._file.buffer = True, True, io.BytesIO()


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, which it keeps, anew after a fork, and the path there."""
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
        extra = " or `pip install trainer-lib[s3]`" if scheme in ("s3", "s3a") else ""
        raise MissingPackageError(f"For {scheme}:// a package is missing: {error}{extra}.") from error


def _refuse_cut_url(path: Path) -> None:
    first = path.parts[0] if path.parts else ""
    if len(first) > 2 and first.endswith(":") and len(path.parts) > 1:
        raise ConfigurationError(
            f"{str(path)!r} was a URL before it was made a Path, which takes a slash away. Give it as a text."
        )


def _inside(root: str, name: str) -> str:
    """Return the name of what a file system found, as seen from the folder that it was asked about."""
    return name.strip("/").removeprefix(root.strip("/")).strip("/")


def _is_file(facts: dict[str, Any]) -> bool:
    return facts["type"] == "file" and not facts["name"].endswith("/")  # which marks a folder


def _written(facts: dict[str, Any]) -> float:
    found = next((facts[name] for name in ("LastModified", "mtime", "updated", "created") if name in facts), 0.0)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else float(found or 0.0)


def _reason(error: BaseException) -> str:
    told = masked(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {told[0]}" if told else type(error).__name__
