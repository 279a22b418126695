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
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.files import inside

SCHEMA = 1
_FORMAT = "trainer_lib state"
_SHOWN = 4


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
        files: For each file what is known of it: its size.
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

    def check_files(self, folder: Path) -> None:
        """Raise unless all files are there, in full length.

        Raises:
            CheckpointError: With the names of those that are not.
        """
        complaints: list[str] = []
        for name, facts in self.files.items():
            path = inside(folder, name, MANIFEST_NAME)
            if not path.is_file():
                complaints.append(f"{name} is missing")
            elif path.stat().st_size != facts["size"]:
                complaints.append(f"{name} has {path.stat().st_size} bytes instead of {facts['size']}")
        if complaints:
            more = f", and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
            raise CheckpointError(f"The state in {folder} is damaged: {', '.join(complaints[:_SHOWN])}{more}.")


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
        content = json.loads(path.read_text())
        schema = content["schema"]
        if content.pop("format") != _FORMAT or not isinstance(schema, int):
            raise ValueError("it is of something else")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no manifest of a state: {error}") from error
    if schema > SCHEMA:
        raise CheckpointError(
            f"The state in {folder} has the format {schema}, and this version of trainer_lib reads up to {SCHEMA}. "
            f"It was written by trainer_lib {content.get('versions', {}).get('trainer_lib', 'of a later version')}."
        )
    try:
        manifest = Manifest(**content)
        sizes_are_numbers = all(isinstance(facts["size"], int) for facts in manifest.files.values())
        manifest.kinds.items()
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not sizes_are_numbers:
        raise CheckpointError(f"{path} is damaged: sizes have to be numbers.")
    return manifest
