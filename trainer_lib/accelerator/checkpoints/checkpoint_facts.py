"""The facts that a checkpoint's manifest records: those of the `Accelerator`, and those that callers register."""

from collections.abc import Sequence
from typing import Any

from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints
from trainer_lib.checkpointing.format.manifest import REPORTED_FIELDS, Manifest, check_reported
from trainer_lib.checkpointing.format.state_parts import Part, kinds_of
from trainer_lib.foundation.errors import ConfigurationError, unknown


def make_manifest(checkpoints: Checkpoints, parts: Sequence[Part], is_automatic: bool, world_size: int) -> Manifest:
    """Return the manifest of a checkpoint before its files are written.

    Args:
        checkpoints: The checkpoints that the new one joins.
        parts: The parts to save.
        is_automatic: Whether the checkpoint is named automatically, by its number.
        world_size: The number of ranks that save.

    Raises:
        ConfigurationError: If a registered function returns a fact that a manifest does not know.
    """
    engine, registered = checkpoints.engine, dict[str, Any]()
    for facts in list(checkpoints.facts.values()):
        registered |= facts()
    for name in registered:
        if name not in REPORTED_FIELDS:
            raise ConfigurationError(unknown("fact", name, REPORTED_FIELDS))
    automatic: dict[str, Any] = {
        "world_size": world_size,
        "step": engine.window.backwards,
        "backwards": engine.window.backwards,
        "iteration": checkpoints.project.iteration if is_automatic else None,
        "precision": engine.precision.name,
        "parts": [part.name for part in parts],
        "kinds": kinds_of(parts),
    }
    manifest = Manifest(**automatic | registered)
    check_reported(manifest)
    return manifest
