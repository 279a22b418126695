"""This file is the manifest of a state folder: what is in it and of which training. It is written last."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.layout import MANIFEST_NAME
from trainer_lib.foundation.checksums import checksum_of_bytes
from trainer_lib.foundation.errors import CheckpointError, DamagedError

SCHEMA = 2  # 1 had the sizes of files and no checksums
CHECKSUM = "xxh3_128"  # what a file's checksum is called by
_FORMAT = "trainer_lib state"
_TYPES: dict[str, Any] = {
    "world_size": int,
    "step": int,
    "iteration": int | None,
    "precision": str,
    "parts": list,
    "kinds": dict,
    "files": dict,
    "versions": dict,
}
_UNSEALED = "0" * 32


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a state folder says of itself.

    Args:
        world_size: How many processes saved it.
        step: The backward passes that the training had made.
        iteration: Its number under automatic naming, if it has one.
        precision: The precision of the training.
        parts: The names of what was saved.
        kinds: For the parts of which that matters, the name of their class.
        files: For each file what is known of it: its size and its checksum.
        versions: Of the libraries that wrote it.
        schema: The version of this format.
    """

    world_size: int
    step: int = 0
    iteration: int | None = None
    precision: str = "no"
    parts: Sequence[str] = ()
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    schema: int = SCHEMA

    def content(self) -> dict[str, Any]:
        """Return what the file says."""
        return {"format": _FORMAT, **asdict(self)}


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest; its digest is that of all of them, taken with zeros in its own place."""
    text = json.dumps({**content, "digest": _UNSEALED}, indent=2, allow_nan=False) + "\n"
    return text.replace(_UNSEALED, checksum_of_bytes(text.encode())).encode()


def library_versions() -> dict[str, str]:
    """Return the versions of what has a part in how a state is written and read."""
    others = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    own = sys.modules["trainer_lib"].__version__  # above everything, so that no import from here may name it
    return {"trainer_lib": own, "python": platform.python_version(), **others}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a state folder.

    Raises:
        CheckpointError: If it is none, is damaged, or is of a later version of the library.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError as error:
        raise DamagedError(f"{path} is no manifest of a state: {error}") from error
    try:
        content = json.loads(text)
        schema = content["schema"]
        if content.pop("format") != _FORMAT or not isinstance(schema, int):
            raise ValueError("it is of something else")
        digest = content.pop("digest", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is no manifest of a state: {error}") from error
    _check_seal(path, text, digest, schema)
    if schema > SCHEMA:
        raise CheckpointError(
            f"The state in {folder} has the format {schema}, and this version of trainer_lib reads up to {SCHEMA}. "
            f"It was written by trainer_lib {content.get('versions', {}).get('trainer_lib', 'of a later version')}."
        )
    try:
        manifest = Manifest(**content)
        _check_types(manifest)
        sizes_are_numbers = all(isinstance(facts["size"], int) for facts in manifest.files.values())
        has_checksums = schema < 2 or all(isinstance(facts[CHECKSUM], str) for facts in manifest.files.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    if not sizes_are_numbers or not has_checksums:
        raise DamagedError(f"{path} is damaged: sizes have to be numbers, and checksums texts.")
    return manifest


def _check_types(manifest: Manifest) -> None:
    for name, kind in _TYPES.items():
        value = getattr(manifest, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")
    for name in (*manifest.parts, *manifest.kinds.values(), *manifest.versions.values()):
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no text")


def _check_seal(path: Path, text: bytes, digest: Any, schema: int) -> None:
    if digest is None and schema < 2:
        return
    if digest is None:
        raise DamagedError(f"{path} is damaged: it has no digest.")
    found = checksum_of_bytes(text.replace(str(digest).encode(), _UNSEALED.encode()))
    if found != digest:
        raise DamagedError(f"{path} is damaged: by its digest it is {digest}, and what is there is {found}.")
