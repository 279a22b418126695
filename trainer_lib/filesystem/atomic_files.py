"""This file is writing files so that they are there, whole, after a crash; and staying inside a folder."""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError

_Path = TypeVar("_Path", bound=AnyPath)


def sync(path: Path) -> None:
    """Have the disk take a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside `path`, and put it there at once: readers see the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def inside(folder: _Path, name: object, told_by: str) -> _Path:
    """Return the path of `name` in `folder`.

    Args:
        folder: The folder.
        name: What a file says is in it.
        told_by: The file that says so.

    Raises:
        CheckpointError: If the name leads out of the folder, on its own or by a link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"{told_by} names a file {name!r}, which is no name.")
    pure = PurePosixPath(name)
    if pure.is_absolute() or PureWindowsPath(name).drive or ".." in pure.parts or "\\" in name:
        raise CheckpointError(f"{told_by} names {name!r}, which leads out of {folder}. It will not be read.")
    path: Any = folder / pure
    root: Any = folder.resolve()
    # The Hugging Face cache keeps the files of all versions in one folder, and links to them.
    if root.parent.name == "snapshots":
        root = root.parent.parent
    if not path.resolve().is_relative_to(root):
        raise CheckpointError(
            f"{told_by} names {name!r}, a link out of {folder} to {path.resolve()}. It will not be read."
        )
    return path
