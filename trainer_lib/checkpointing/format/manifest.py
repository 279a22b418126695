"""This file is the manifest of a state folder: what is in it and of which training. It is written last."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.filesystem.checksums import checksum_of_bytes
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, DamagedError

SCHEMA = 3  # 1 had the sizes of files and no checksums, 2 nothing of the run
CHECKSUM = "xxh3_128"  # what a file's checksum is called by
NONFINITE = "nonfinite"  # what is known of a file of weights or of an optimizer, if some tensors in it are not finite
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
# What who trains tells of a state, by the names it has in a manifest.
REPORTED_FIELDS = ("run_id", "step", "epoch", "samples", "items", "arguments", "reasons", "metrics", "best")
_ENCODED = ("arguments", "metrics", "best")  # which may hold values that JSON cannot represent, such as NaN


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a state folder says of itself.

    Args:
        world_size: How many processes saved it.
        step: The updates that the training had made; of a loop that does not tell them, its backward passes.
        backwards: The backward passes that it had made.
        iteration: Its number under automatic naming, if it has one.
        precision: The precision of the training.
        run_id: The run it is of; this and the following are known of a Trainer, or of what a loop of one's own tells.
        epoch: The passes over the data.
        samples: The samples that updates were made from.
        items: What the loss counted in them: tokens of a language model, samples of a classifier.
        arguments: The arguments of the training, as plain values.
        reasons: Why it was saved: "interval", "best", "end", "asked", "interruption", "exception"; "imported".
        metrics: The evaluation at its step, if there was one.
        best: The best evaluation so far: its metric, value and step.
        origin: Of what another library saved: which, and what of it was left out.
        parts: The names of what was saved.
        kinds: For the parts of which that matters, the name of their class.
        files: For each file what is known of it: its size, its checksum, and which tensors in it are not finite.
        versions: Of the libraries that wrote it.
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
        """Return what the file says."""
        content = {"format": _FORMAT, **asdict(self)}
        return content | {name: _plain(name, content[name]) for name in _ENCODED}


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest; its digest is that of all of them, taken with zeros in its own place."""
    text = json.dumps({**content, "digest": _UNSEALED}, indent=2, allow_nan=False) + "\n"
    return text.replace(_UNSEALED, checksum_of_bytes(text.encode())).encode()


def library_versions() -> dict[str, str]:
    """Return the versions of what has a part in how a state is written and read."""
    others = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    own = sys.modules["trainer_lib"].__version__  # above everything, so that no import from here may name it
    return {"trainer_lib": own, "python": platform.python_version(), **others}


def read_manifest(folder: AnyPath) -> Manifest:
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
        content = read_json(text)
        schema = content["schema"]
        if content.pop("format") != _FORMAT or not isinstance(schema, int):
            raise ValueError("it is of something else")
        digest = content.pop("digest", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is no manifest of a state: {error}") from error
    _check_seal(path, text, digest, schema)
    if schema > SCHEMA:
        raise CheckpointError(
            f"The state in {folder} has the format {schema}, and this version of trainer_lib reads up to {SCHEMA}. "
            f"It was written by trainer_lib {content.get('versions', {}).get('trainer_lib', 'of a later version')}."
        )
    try:
        if schema < 3:
            content["backwards"] = content["step"]
        content |= {name: decode(Encoded(content[name]), label=name) for name in _ENCODED if name in content}
        manifest = Manifest(**content)
        _check_types(manifest)
        sizes_are_numbers = all(isinstance(facts["size"], int) for facts in manifest.files.values())
        names_are_texts = all(isinstance(name, str) for name in manifest.nonfinite)
        has_checksums = schema < 2 or all(isinstance(facts[CHECKSUM], str) for facts in manifest.files.values())
    except (KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    if not (sizes_are_numbers and has_checksums and names_are_texts):
        raise DamagedError(f"{path} is damaged: sizes have to be numbers, and checksums texts.")
    return manifest


def check_reported(manifest: Manifest) -> None:
    """Raise unless what was told of a state can be written and read back.

    Raises:
        ConfigurationError: With what cannot.
    """
    try:
        _check_types(manifest)
        manifest.content()
    except (TypeError, CheckpointError) as error:
        raise ConfigurationError(f"What was told of the state (register_state_facts): {error}") from error


def _plain(name: str, value: Any) -> Any:
    encoded = encode(value, label=name)
    if encoded.tensors:
        raise CheckpointError(f"{name} has tensors or arrays in it: {', '.join(encoded.tensors)}. Give plain values.")
    return encoded.tree


def _check_types(manifest: Manifest) -> None:
    for name, kind in _TYPES.items():
        value = getattr(manifest, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")
    for name in (*manifest.parts, *manifest.kinds.values(), *manifest.versions.values(), *manifest.reasons):
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no text")
    if manifest.origin is not None and not isinstance(manifest.origin.get("left_out"), dict):
        raise TypeError(f"origin is {dict(manifest.origin)!r}")


def _check_seal(path: AnyPath, text: bytes, digest: Any, schema: int) -> None:
    if digest is None and schema < 2:
        return
    if digest is None:
        raise DamagedError(f"{path} is damaged: it has no digest.")
    found = checksum_of_bytes(text.replace(str(digest).encode(), _UNSEALED.encode()))
    if found != digest:
        raise DamagedError(f"{path} is damaged: by its digest it is {digest}, and what is there is {found}.")
