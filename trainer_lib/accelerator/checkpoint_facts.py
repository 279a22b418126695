"""The facts that a checkpoint's manifest records: those of the `Accelerator`, and those that callers register."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_lib.checkpointing.format.manifest import REPORTED_FIELDS, Manifest, check_reported
from trainer_lib.checkpointing.format.state_parts import Part, kinds_of
from trainer_lib.foundation.errors import ConfigurationError, unknown

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints import CheckpointMethods


def make_manifest(accelerator: "CheckpointMethods", parts: Sequence[Part], is_automatic: bool) -> Manifest:
    """Return the manifest of a checkpoint before its files are written.

    Args:
        accelerator: The `Accelerator`.
        parts: The parts to save.
        is_automatic: Whether the checkpoint is named automatically, by its number.

    Raises:
        ConfigurationError: If a registered function returns a fact that a manifest does not know.
    """
    registered: dict[str, Any] = {}
    for facts in list(accelerator._facts.values()):
        registered |= facts()
    for name in registered:
        if name not in REPORTED_FIELDS:
            raise ConfigurationError(unknown("fact", name, REPORTED_FIELDS))
    automatic: dict[str, Any] = {
        "world_size": accelerator.num_processes,
        "step": accelerator.window.backwards,
        "backwards": accelerator.window.backwards,
        "iteration": accelerator.save_iteration if is_automatic else None,
        "precision": accelerator.precision.name,
        "parts": [part.name for part in parts],
        "kinds": kinds_of(parts),
    }
    manifest = Manifest(**automatic | registered)
    check_reported(manifest)
    return manifest
