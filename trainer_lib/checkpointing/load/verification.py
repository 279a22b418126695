"""This file is whether a state on disk is as it was written: which files, how long, and every byte of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.manifest import CHECKSUM, Manifest
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.atomic_files import inside
from trainer_lib.filesystem.checksums import for_each_file
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, DamagedError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_SHOWN = 4


def check_sizes(folder: AnyPath, manifest: Manifest) -> None:
    """Raise unless all files are there, in full length, and nothing among them that does not belong; reads none.

    Raises:
        DamagedError: With the names of those that are not.
    """
    found = storage_of(folder).sizes()
    complaints = [*_sizes(folder, manifest.files, found), *_strangers(manifest, found)]
    if complaints:
        raise damaged(folder, complaints)


def check_bytes(folder: AnyPath, manifest: Manifest, names: Collection[str] | None = None) -> None:
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


def differences(folder: AnyPath, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Return what is wrong with the bytes of files, each with what was expected and what was found."""
    if manifest.schema < 2:
        _logger.info("The state in %s has no checksums (it is of format 1): sizes alone were checked.", folder)
        return []
    for name in names:
        inside(folder, name, MANIFEST_NAME)
    complaints = for_each_file(lambda name: _difference(folder, name, manifest.files[name]), names)
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


def damaged(folder: AnyPath, complaints: Sequence[str]) -> DamagedError:
    """Return the error that tells what is wrong with a state."""
    more = f", and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
    return DamagedError(f"The state in {folder} is damaged: {', '.join(complaints[:_SHOWN])}{more}.")


def _sizes(folder: AnyPath, files: Mapping[str, Mapping[str, Any]], found: Mapping[str, int]) -> list[str]:
    complaints: list[str] = []
    for name, facts in files.items():
        inside(folder, name, MANIFEST_NAME)
        if name not in found:
            complaints.append(f"{name} is missing")
        elif found[name] != facts["size"]:
            complaints.append(f"{name} has {found[name]} bytes instead of {facts['size']}")
    return complaints


def _strangers(manifest: Manifest, found: Iterable[str]) -> list[str]:
    """Return what was put where the files of a part are looked for; other files that people add are theirs."""
    taken = {_stem(name) for name in manifest.files} | set(manifest.parts)
    strangers = [
        name
        for name in found
        if name not in manifest.files and _stem(name) in taken and name.endswith((".json", ".safetensors"))
    ]
    return [f"{name} was not written with it" for name in sorted(strangers)]


def _stem(name: str) -> str:
    return name.split("/", 1)[0].split(".", 1)[0]


def _difference(folder: AnyPath, name: str, facts: Mapping[str, Any]) -> str | None:
    try:
        found = storage_of(folder).checksum(name)
    except PermissionError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}.") from error
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    expected = facts[CHECKSUM]
    return None if found == expected else f"{name} has the checksum {found} instead of {expected}"
