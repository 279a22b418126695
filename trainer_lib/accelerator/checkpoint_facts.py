"""This file is what a state says of itself: what the engine knows, and what those tell who were asked to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_lib.checkpointing.format.manifest import REPORTED_FIELDS, Manifest, check_reported
from trainer_lib.checkpointing.format.state_parts import Part, kinds_of
from trainer_lib.foundation.errors import ConfigurationError, unknown

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints import Persistence


def described(engine: "Persistence", parts: Sequence[Part], is_automatic: bool) -> Manifest:
    """Return the manifest of a state that is about to be written; its files are not known yet.

    Args:
        engine: The `Accelerator`.
        parts: What is saved.
        is_automatic: Whether it is named automatically, by its number.

    Raises:
        ConfigurationError: If somebody tells what a manifest has no place for.
    """
    told: dict[str, Any] = {}
    for facts in list(engine._facts.values()):
        told |= facts()
    for name in told:
        if name not in REPORTED_FIELDS:
            raise ConfigurationError(unknown("fact", name, REPORTED_FIELDS))
    known: dict[str, Any] = {
        "world_size": engine.num_processes,
        "step": engine._window.backwards,
        "backwards": engine._window.backwards,
        "iteration": engine.save_iteration if is_automatic else None,
        "precision": engine.precision.name,
        "parts": [part.name for part in parts],
        "kinds": kinds_of(parts),
    }
    manifest = Manifest(**known | told)
    check_reported(manifest)
    return manifest
