"""The checkpoints of a run that exist on disk, and those of other runs that are in their place."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.checkpointing.format.layout import committed, is_committed, other_run_beside
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError, UnreachableError, UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.runs import RunFolder

_logger = get_logger(__name__)


def existing_checkpoints(
    listed: Sequence[Mapping[str, Any]], folder: RunFolder | None, up_to: int
) -> list[dict[str, Any]]:
    """Return the entries of the checkpoints that exist on disk, the oldest first.

    A listed checkpoint may have been deleted or renamed as damaged since, or the run's folder moved. A checkpoint that
    was written while the run ended may not be listed.

    Args:
        listed: The entries in the checkpoint that the run resumes from.
        folder: The run's folder.
        up_to: The step that the run resumes at.
    """
    on_disk = {
        path.name.removesuffix(".replaced"): path for path in (folder.checkpoints() if folder is not None else [])
    }
    by_step: dict[int, dict[str, Any]] = {}
    for listed_entry in listed:
        path = path_at(listed_entry["path"])
        path = on_disk.get(path.name, path)
        if committed(path) is not None:
            by_step[listed_entry["step"]] = {**listed_entry, "path": str(path)}
    for path in on_disk.values():
        entry = _entry_of(path)
        if entry is not None and entry["step"] <= up_to:
            by_step[entry["step"]] = {**entry, **by_step.get(entry["step"], {}), **_faults(entry)}
    return [by_step[step] for step in sorted(by_step)]


def set_other_run_aside(target: AnyPath, run_id: str) -> None:
    """Rename the checkpoint of another run, such as a copy, that a checkpoint of this run would replace.

    Args:
        target: The folder that a checkpoint of this run is saved to.
        run_id: This run.

    Raises:
        UnwritableError: If it cannot be renamed.
    """
    checkpoint = committed(target)
    owner = None if checkpoint is None else _owner(checkpoint)
    if checkpoint is None or owner in (None, run_id):
        return
    aside = other_run_beside(target)
    try:
        storage_of(checkpoint).rename(aside.name)
    except OSError as error:
        raise UnwritableError(
            f"{checkpoint} is a checkpoint of another run, {owner}, and could not be renamed to {aside.name}: "
            f"{error.strerror}. It is not replaced. Move it away."
        ) from error
    _logger.warning(
        "%s is a checkpoint of another run, %s. It is renamed to %s, so that this run can save there.",
        checkpoint,
        owner,
        aside.name,
    )


def _owner(checkpoint: AnyPath) -> str | None:
    """Return the run that a checkpoint belongs to; `None` if it is unknown."""
    try:
        return read_manifest(checkpoint).run_id
    except UnreachableError:
        raise
    except CheckpointError:
        return None


def _entry_of(path: AnyPath) -> dict[str, Any] | None:
    if not is_committed(path):
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError:  # it is renamed as damaged when a run would resume from it
        return None
    if manifest.run_id is None:
        return None
    position = {"epoch": manifest.epoch, "samples": manifest.samples, "seconds": None}
    faults = {"nonfinite": manifest.nonfinite} if manifest.nonfinite else {}
    return {"path": str(path), "step": manifest.step, "metrics": dict(manifest.metrics), **position, **faults}


def _faults(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with NaN or Inf, which only the checkpoint's manifest records."""
    return {"nonfinite": entry["nonfinite"]} if "nonfinite" in entry else {}
