"""Writing files atomically, logs whose lines wait for the disk, and paths that must stay inside a folder."""

import errno
import logging
import os
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError

_Path = TypeVar("_Path", bound=AnyPath)

_logger = logging.getLogger(__name__)  # not get_logger: each rank warns of its own files

ESCAPED = "backslashreplace"
_OF_FILES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder with its parents, if they are missing, and flush their entries to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically: `write` writes a temporary file beside `path`, which is then renamed."""
    replace_files({path: write})


def replace_files(writes: Mapping[Path, Callable[[Path], object]]) -> None:
    """Replace files of one folder that belong together; the last one is the index of the others, if there are others.

    All are written to temporary files first. While those that exist are replaced, there is no index.
    """
    partials = {path: path.with_name(f".{path.name}.partial") for path in writes}
    *others, last = partials
    try:
        for path, write in writes.items():
            write(partials[path])
            sync(partials[path])
        if any(path.exists() for path in others):
            last.unlink(missing_ok=True)
            sync(last.parent)
        for path, partial in partials.items():
            partial.replace(path)
        sync(last.parent)
    except BaseException:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise


def append_text(path: Path, text: str) -> None:
    """Append a text to a file, or leave it unchanged if the disk does not take all of it.

    What UTF-8 lacks, such as the bytes of a file name in another encoding, is escaped as JSON escapes it.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8", errors=ESCAPED, newline="") as file:
            file.write(text)
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


class LogWrites:
    """Writes to a log whose content waits while the disk does not take it, with one warning until it does.

    Args:
        content: What waits, for the warning: "lines" or "rows".
    """

    def __init__(self, content: str) -> None:
        self._content, self._is_failing = content, False

    def attempt(self, path: Path, write: Callable[[], object]) -> bool:
        """Call `write` once the folder of the file exists; return whether the disk took what it wrote."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            if not self._is_failing:
                reason = error.strerror or error
                _logger.warning("%s cannot be written: %s. Its %s wait until it can.", path, reason, self._content)
            self._is_failing = True
        else:
            self._is_failing = False
        return not self._is_failing


def says_damaged(error: OSError) -> bool:
    """Whether an error says that a file is missing, is no file or cannot be read from its disk.

    Others say that this process may not read it, or not now: too many open files, no memory, a server that is away.
    """
    return error.errno in _OF_FILES


def log_file(path: str | Path, owner: str) -> Path:
    """Return the path of a log file, which a new run may replace.

    Args:
        path: The path as given.
        owner: The class that was given the path, for the error.

    Raises:
        ConfigurationError: If the path is a folder.

    Example:
        >>> log_file("history.csv", "CsvLog").name
        'history.csv'
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigurationError(f"{owner}(path) must be a file (got the folder {str(file)!r}). Give a file in it.")
    return file


def path_inside(folder: _Path, name: object, source: str) -> _Path:
    """Return the path of `name` in `folder`.

    Args:
        folder: The folder.
        name: The name, which comes from a file that may be damaged or malicious.
        source: The file that the name comes from.

    Raises:
        CheckpointError: If the name leads out of the folder, directly or by a link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"{source} names a file {name!r}, which is not a valid name.")
    pure = PurePosixPath(name)
    if pure.is_absolute() or PureWindowsPath(name).drive or ".." in pure.parts or "\\" in name:
        raise CheckpointError(f"{source} names {name!r}, which leads out of {folder}. It is not read.")
    path: Any = folder / pure
    if not _has_link(folder, pure):
        return path
    root = Path(os.path.realpath(str(folder)))
    # The Hugging Face cache keeps the files of all versions in one folder, and links to them.
    if root.parent.name == "snapshots":
        root = root.parent.parent
    # `resolve` would raise for a link to itself, which readers take for a missing file.
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise CheckpointError(
            f"{source} names {name!r}, a link out of {folder} to {target}. It is not read. Replace the link by a copy."
        )
    return path


def _has_link(folder: AnyPath, inside: PurePosixPath) -> bool:
    """Whether a path in a folder goes over a link. Asking is ten times faster than resolving the path."""
    if not isinstance(folder, Path):  # a URL
        return False
    steps = accumulate(inside.parts, os.path.join, initial=os.fspath(folder))
    return os.name == "nt" or any(map(os.path.islink, steps))  # Windows has other kinds of links
