"""Verifying a checkpoint: the names, sizes and checksums of its files."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.manifest import CHECKSUM, Manifest
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.atomic_files import path_inside, says_damaged
from trainer_lib.filesystem.checksums import for_each_file
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, DamagedError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_SHOWN = 4
_SHARDS = ".shards/"  # the end of the only folders that parts read


def check_sizes(folder: AnyPath, manifest: Manifest) -> None:
    """Raise unless all files exist in full length, without extra files that a part would read; reads no contents.

    Raises:
        DamagedError: With the names of the wrong files.
        CheckpointError: If the folder cannot be read.
    """
    try:
        present = storage_of(folder).sizes()
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}.") from error
    complaints = [*_wrong_sizes(folder, manifest.files, present), *_extra_files(manifest, present)]
    if complaints:
        raise damaged(folder, complaints)


def check_bytes(
    folder: AnyPath,
    manifest: Manifest,
    names: Collection[str] | None = None,
    checksum: Callable[[str], str] | None = None,
) -> None:
    """Raise unless all files have the checksums in the manifest.

    Args:
        folder: The checkpoint.
        manifest: Its manifest. The sizes of the files must have been checked.
        names: The files to check; by default all.
        checksum: Reads a file and returns its checksum.

    Raises:
        DamagedError: With the names of the files that differ.
    """
    complaints = differences(folder, manifest, manifest.files if names is None else names, checksum)
    if complaints:
        raise damaged(folder, complaints)


def differences(
    folder: AnyPath, manifest: Manifest, names: Collection[str], checksum: Callable[[str], str] | None = None
) -> list[str]:
    """Return a message for each file whose bytes are wrong, with the expected and the actual checksum."""
    if manifest.schema < 2:
        _logger.info("The checkpoint %s has no checksums (format 1): only the sizes of its files were checked.", folder)
        return []
    for name in names:
        path_inside(folder, name, MANIFEST_NAME)
    read = checksum or storage_of(folder).checksum
    complaints = for_each_file(lambda name: _difference(folder, name, manifest.files[name], read), names)
    return [complaint for complaint in complaints if complaint is not None]


def share(files: Mapping[str, Mapping[str, Any]], rank: int, size: int) -> list[str]:
    """Return the files that a rank reads, so that all ranks read about as many bytes."""
    loads = [0] * size
    names: list[str] = []
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["size"]
        if least == rank:
            names.append(name)
    return names


def damaged(folder: AnyPath, complaints: Sequence[str]) -> DamagedError:
    """Return the error for a damaged checkpoint, with what is wrong."""
    more = f", and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
    return DamagedError(f"The checkpoint {folder} is damaged: {', '.join(complaints[:_SHOWN])}{more}.")


def _wrong_sizes(folder: AnyPath, files: Mapping[str, Mapping[str, Any]], present: Mapping[str, int]) -> list[str]:
    complaints: list[str] = []
    for name, facts in files.items():
        path_inside(folder, name, MANIFEST_NAME)
        if name not in present:
            complaints.append(f"{name} is missing")
        elif present[name] != facts["size"]:
            complaints.append(f"{name} has {present[name]} bytes instead of {facts['size']}")
    return complaints


def _extra_files(manifest: Manifest, present: Iterable[str]) -> list[str]:
    """Return the files that a part would read and that are not in the manifest; other added files are allowed."""
    stems = {_stem(name) for name in manifest.files} | set(manifest.parts)
    extra = [
        name
        for name in present
        if name not in manifest.files
        and _stem(name) in stems
        and ("/" not in name or _SHARDS in name)
        and name.endswith((".json", ".safetensors"))
    ]
    return [f"{name} is not in its manifest" for name in sorted(extra)]


def _stem(name: str) -> str:
    return name.split("/", 1)[0].split(".", 1)[0]


def _difference(folder: AnyPath, name: str, facts: Mapping[str, Any], checksum: Callable[[str], str]) -> str | None:
    try:
        actual = checksum(name)
    except OSError as error:
        if not says_damaged(error):
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}.") from error
        return f"{name} cannot be read: {error.strerror}"
    expected = facts[CHECKSUM]
    return None if actual == expected else f"{name} has the checksum {actual} instead of {expected}"
