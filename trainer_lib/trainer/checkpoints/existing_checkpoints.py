"""The checkpoints of a resumed run that exist on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.checkpointing.format.layout import committed, is_committed
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.runs import RunFolder


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
