"""The manifest of a checkpoint: its files, their checksums, and the facts of the training. It is written last."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.plain_json import decode_plain
from trainer_lib.filesystem.atomic_files import says_damaged
from trainer_lib.filesystem.checksums import checksum_of_bytes
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, DamagedError
from trainer_lib.foundation.imports import version_of
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

SCHEMA = 3  # version 1 had the sizes of files and no checksums; 2 had no facts of the run
CHECKSUM = "xxh3_128"  # the key of a file's checksum
NONFINITE = "nonfinite"  # the key of the tensors of a file that have a NaN or an infinity
_FORMAT = "trainer_lib state"
_NONE = type(None)
_TYPES: dict[str, Any] = {
    "world_size": int,
    "step": int,
    "backwards": int,
    "iteration": int | None,
    "precision": str,
    "run_id": str | None,
    "epoch": float | int | None,
    "samples": int | None,
    "items": float | int | None,
    "arguments": (dict, _NONE),
    "reasons": (list, tuple),
    "metrics": dict,
    "best": (dict, _NONE),
    "origin": (dict, _NONE),
    "parts": list,
    "kinds": dict,
    "files": dict,
    "versions": dict,
}
_UNSEALED = "0" * 32
# The fields that the training reports.
REPORTED_FIELDS = ("run_id", "step", "epoch", "samples", "items", "arguments", "reasons", "metrics", "best")
_ENCODED = ("arguments", "metrics", "best")  # may hold values that JSON cannot represent, such as NaN


@frozen_dataclass(kw_only=True)
class Manifest:
    """The contents of `manifest.json`.

    A Trainer reports `run_id` and the fields after it; your own loop reports them with `register_state_facts`.

    Args:
        world_size: How many ranks saved the checkpoint.
        step: The optimizer steps that were made; backward passes, if your own loop does not report steps.
        backwards: The backward passes that were made.
        iteration: Its number under automatic naming, if it has one.
        precision: The precision of the training.
        run_id: The run that the checkpoint belongs to.
        epoch: The passes over the data.
        samples: The samples that updates were made from.
        items: What the loss counted in these samples: tokens of a language model, samples of a classifier.
        arguments: The arguments of the training, as plain values.
        reasons: Why it was saved: "interval", "best", "end", "asked", "interruption", "exception"; "imported".
        metrics: The evaluation at its step, if there was one.
        best: The best evaluation so far: its metric, value and step.
        origin: For a converted checkpoint, the library that saved it, and what the conversion left out.
        parts: The names of the parts that were saved.
        kinds: The class of each part that only an object of the same class can load.
        files: For each file its size, its checksum, and its tensors with a NaN or an infinity.
        versions: The versions of the libraries that wrote it.
        schema: The version of this format.
    """

    world_size: int
    step: int = 0
    backwards: int = 0
    iteration: int | None = None
    precision: str = "no"
    run_id: str | None = None
    epoch: float | None = None
    samples: int | None = None
    items: float | None = None
    arguments: Mapping[str, Any] | None = None
    reasons: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    best: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    parts: Sequence[str] = ()
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    schema: int = SCHEMA

    @property
    def nonfinite(self) -> list[str]:
        """The weights and buffers with a NaN or an infinity and the optimizer states with a NaN, by name."""
        return list(dict.fromkeys(name for facts in self.files.values() for name in facts.get(NONFINITE, ())))

    def content(self) -> dict[str, Any]:
        """Return the contents of the file, without the digest."""
        content = {"format": _FORMAT, **vars(self)}
        return content | {name: _plain(name, content[name]) for name in _ENCODED}


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest with its digest, which is computed with zeros in its own place."""
    text = json.dumps({**content, "digest": _UNSEALED}, indent=2, allow_nan=False) + "\n"
    before, _, after = text.rpartition(_UNSEALED)  # the last: a fact may have as many zeros
    return f"{before}{checksum_of_bytes(text.encode())}{after}".encode()


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that write and read checkpoints."""
    dependencies = {name: version_of(name) for name in ("torch", "numpy", "safetensors")}
    library = sys.modules["trainer_lib"].__version__  # not imported: the package is above this layer
    return {"trainer_lib": library, "python": platform.python_version(), **dependencies}


def read_manifest(folder: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedError: If there is no manifest, or it is damaged.
        CheckpointError: If it cannot be read, or a later version of the library wrote it.
    """
    path = folder / MANIFEST_NAME
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():  # a pipe would block the reader
            raise DamagedError(f"{path} is not the manifest of a checkpoint: it is not a regular file.")
        text = path.read_bytes()
    except OSError as error:
        if not says_damaged(error):
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        raise DamagedError(f"{path} is not the manifest of a checkpoint: {error}") from error
    try:
        content = read_json(text)
        schema = content["schema"]
        if content.pop("format") != _FORMAT or not isinstance(schema, int):
            raise ValueError("it has another format")
        digest = content.pop("digest", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not the manifest of a checkpoint: {error}") from error
    _check_seal(path, text, digest, schema)
    if schema > SCHEMA:
        raise CheckpointError(
            f"The checkpoint {folder} has format {schema}, and this version of trainer_lib reads formats up to "
            f"{SCHEMA}. It was written by trainer_lib "
            f"{content.get('versions', {}).get('trainer_lib', 'of a later version')}: install that version or newer."
        )
    try:
        if schema < 3:
            content["backwards"] = content["step"]
        content |= {name: decode_plain(content[name], name) for name in _ENCODED if name in content}
        manifest = Manifest(**content)
        _check_types(manifest)
        sizes_are_numbers = all(isinstance(facts["size"], int) for facts in manifest.files.values())
        names_are_texts = all(isinstance(name, str) for name in manifest.nonfinite)
        has_checksums = schema < 2 or all(isinstance(facts[CHECKSUM], str) for facts in manifest.files.values())
    except (KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    if not (sizes_are_numbers and has_checksums and names_are_texts):
        raise DamagedError(f"{path} is damaged: sizes must be numbers, and checksums strings.")
    return manifest


def check_reported(manifest: Manifest) -> None:
    """Raise unless the facts that the training reports can be written and read back.

    Raises:
        ConfigurationError: With the fact that cannot.
    """
    try:
        _check_types(manifest)
        manifest.content()
    except (TypeError, CheckpointError) as error:
        raise ConfigurationError(f"A fact reported by register_state_facts cannot be saved: {error}") from error


def _plain(name: str, value: Any) -> Any:
    from trainer_lib.checkpointing.format.state_codec import encode  # only writers need torch

    encoded = encode(value, label=name)
    if encoded.tensors:
        raise CheckpointError(f"{name} contains tensors or arrays: {', '.join(encoded.tensors)}. Give plain values.")
    return encoded.tree


def _check_types(manifest: Manifest) -> None:
    for name, kind in _TYPES.items():
        value = getattr(manifest, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")
    for name in (*manifest.parts, *manifest.kinds.values(), *manifest.versions.values(), *manifest.reasons):
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is not a string")
    if manifest.origin is not None and not isinstance(manifest.origin.get("left_out"), dict):
        raise TypeError(f"origin is {dict(manifest.origin)!r}")


def _check_seal(path: AnyPath, text: bytes, digest: Any, schema: int) -> None:
    if digest is None and schema < 2:
        return
    if digest is None:
        raise DamagedError(f"{path} is damaged: it has no digest.")
    actual = checksum_of_bytes(text.replace(str(digest).encode(), _UNSEALED.encode()))
    if actual != digest:
        raise DamagedError(f"{path} is damaged: its digest is {digest}, and its contents have the digest {actual}.")
