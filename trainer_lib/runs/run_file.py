"""The run file (run.json), written with its own digest and verified on reading."""

import json
from collections.abc import Mapping
from typing import Any

from trainer_lib.checkpointing.format.plain_json import decode_plain
from trainer_lib.filesystem.checksums import checksum_of_bytes
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError, DamagedError

_FORMAT = "trainer_lib run"
_UNSEALED = "0" * 32


def facts_as_bytes(facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a run file, with the digest of all bytes (computed with zeros in the digest's place)."""
    from trainer_lib.checkpointing.format.state_codec import encode  # only writers need torch

    tree: Any = encode(dict(facts), label="run.json").tree
    text = json.dumps({"format": _FORMAT, "digest": _UNSEALED, **tree}, indent=1, allow_nan=False) + "\n"
    return text.replace(_UNSEALED, checksum_of_bytes(text.encode()), 1).encode()


def read_facts(file: AnyPath) -> dict[str, Any]:
    """Return the facts in a run file, verified by its digest, which files of earlier versions lack.

    Raises:
        CheckpointError: If the file is missing, not a regular file, damaged, or does not hold a run's facts.
    """
    try:
        if not file.is_file():  # a pipe of this name would block the reader
            raise CheckpointError("it is not a regular file" if file.exists() else "it is missing")
        text = file.read_bytes()
        tree = read_json(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not isinstance(tree, dict):
        raise DamagedError(f"it holds a {type(tree).__name__}")
    _check_digest(text, tree)
    facts = decode_plain({name: value for name, value in tree.items() if name not in ("format", "digest")})
    if not isinstance(facts, dict):
        raise DamagedError(f"it holds a {type(facts).__name__}")
    return facts


def _check_digest(text: bytes, tree: Mapping[str, Any]) -> None:
    digest = tree.get("digest")
    if digest is None and "format" not in tree:
        return
    actual = checksum_of_bytes(text.replace(str(digest).encode(), _UNSEALED.encode(), 1))
    if digest != actual:
        raise DamagedError(f"it is damaged: the recorded digest is {digest}, the actual one {actual}")
