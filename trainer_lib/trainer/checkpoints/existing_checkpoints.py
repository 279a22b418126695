"""This file is which checkpoints of a run are there when it goes on: its list is made to agree with the disk."""

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
    """Return the entries of the checkpoints that are there, the oldest first.

    Some may have been deleted or put aside since, or the run's folder moved; and a save that was written while the run
    ended may not be listed.

    Args:
        listed: The entries of the checkpoint that is gone on from.
        folder: The run's folder.
        up_to: The step at which the run goes on.
    """
    own = {path.name.removesuffix(".replaced"): path for path in (folder.checkpoints() if folder is not None else [])}
    found: dict[int, dict[str, Any]] = {}
    for one in listed:
        path = path_at(one["path"])
        path = own.get(path.name, path)
        if committed(path) is not None:
            found[one["step"]] = {**one, "path": str(path)}
    for path in own.values():
        entry = _entry_of(path)
        if entry is not None and entry["step"] <= up_to:
            found[entry["step"]] = {**entry, **found.get(entry["step"], {}), **_faults(entry)}
    return [found[step] for step in sorted(found)]


def _entry_of(path: AnyPath) -> dict[str, Any] | None:
    if not is_committed(path):
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError:  # it is put aside when it is next in line
        return None
    if manifest.run_id is None:
        return None
    position = {"epoch": manifest.epoch, "samples": manifest.samples, "seconds": None}
    faults = {"nonfinite": manifest.nonfinite} if manifest.nonfinite else {}
    return {"path": str(path), "step": manifest.step, "metrics": dict(manifest.metrics), **position, **faults}


def _faults(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint knows and the list in it cannot: which tensors are not finite."""
    return {"nonfinite": entry["nonfinite"]} if "nonfinite" in entry else {}
