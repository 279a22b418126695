"""This file is whether a state on disk is as it was written: which files, how long, and every byte of them."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.layout import MANIFEST_NAME
from trainer_lib.checkpointing.manifest import CHECKSUM, Manifest
from trainer_lib.foundation.checksums import checksum_of, for_each_file
from trainer_lib.foundation.errors import CheckpointError, DamagedError
from trainer_lib.foundation.files import inside
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_SHOWN = 4


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise unless all files are there, in full length, and nothing among them that does not belong; reads none.

    Raises:
        DamagedError: With the names of those that are not.
    """
    complaints = [*_sizes(folder, manifest.files), *_strangers(folder, manifest)]
    if complaints:
        raise damaged(folder, complaints)


def check_bytes(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Raise unless all files hold what was written.

    Args:
        folder: The state.
        manifest: Its manifest, with the sizes of whose files is all well.
        names: Of which files; by default of all.

    Raises:
        DamagedError: With the names of those that do not.
    """
    complaints = differences(folder, manifest, manifest.files if names is None else names)
    if complaints:
        raise damaged(folder, complaints)


def differences(folder: Path, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Return what is wrong with the bytes of files, each with what was expected and what was found."""
    if manifest.schema < 2:
        _logger.info("The state in %s has no checksums (it is of format 1): sizes alone were checked.", folder)
        return []
    paths = {inside(folder, name, MANIFEST_NAME): name for name in names}
    complaints = for_each_file(lambda path: _difference(path, paths[path], manifest.files[paths[path]]), paths)
    return [complaint for complaint in complaints if complaint is not None]


def share(files: Mapping[str, Mapping[str, Any]], rank: int, size: int) -> list[str]:
    """Return which files a process reads, so that each of them has about as many bytes to read."""
    loads = [0] * size
    own: list[str] = []
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["size"]
        if least == rank:
            own.append(name)
    return own


def damaged(folder: Path, complaints: Sequence[str]) -> DamagedError:
    """Return the error that tells what is wrong with a state."""
    more = f", and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
    return DamagedError(f"The state in {folder} is damaged: {', '.join(complaints[:_SHOWN])}{more}.")


def _sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    complaints: list[str] = []
    for name, facts in files.items():
        path = inside(folder, name, MANIFEST_NAME)
        if not path.is_file():
            complaints.append(f"{name} is missing")
        elif path.stat().st_size != facts["size"]:
            complaints.append(f"{name} has {path.stat().st_size} bytes instead of {facts['size']}")
    return complaints


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Return what was put where the files of a part are looked for; other files that people add are theirs."""
    taken = {_stem(name) for name in manifest.files} | set(manifest.parts)
    found: list[str] = []
    for parent, _, names in os.walk(folder):
        paths = [Path(parent, name).relative_to(folder).as_posix() for name in names]
        found += [
            path
            for path in paths
            if path not in manifest.files and _stem(path) in taken and path.endswith((".json", ".safetensors"))
        ]
    return [f"{name} was not written with it" for name in sorted(found)]


def _stem(name: str) -> str:
    return name.split("/", 1)[0].split(".", 1)[0]


def _difference(path: Path, name: str, facts: Mapping[str, Any]) -> str | None:
    try:
        found = checksum_of(path)
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    expected = facts[CHECKSUM]
    return None if found == expected else f"{name} has the checksum {found} instead of {expected}"
