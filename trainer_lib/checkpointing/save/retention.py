"""Retention: which checkpoints of a project or a run stay, and deleting the others."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    automatic_name,
    automatic_number,
    committed,
    has_accelerates_layout,
    replaced_beside,
)
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.load.verification import check_sizes
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_FIELDS = {"steps": "step", "epochs": "epoch", "samples": "samples", "seconds": "seconds"}
_ROUNDING = 1e-9  # the error that a sum of fractions of an epoch may have


def automatic_states(folder: AnyPath) -> dict[int, AnyPath]:
    """Return the complete checkpoints under automatic naming by number, the oldest first."""
    numbers = {automatic_number(path.name) for path in storage_of(folder).states()} - {None}
    checkpoints = {number: folder / automatic_name(number) for number in sorted(n for n in numbers if n is not None)}
    return {number: path for number, path in checkpoints.items() if _is_complete(path)}


def _is_complete(path: AnyPath) -> bool:
    return committed(path) is not None or (isinstance(path, Path) and has_accelerates_layout(path))


def delete_oldest(folder: AnyPath, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints under automatic naming."""
    for path in list(automatic_states(folder).values())[:-keep]:
        delete_state(path)


def steps_at_intervals(checkpoints: Iterable[Mapping[str, Any]], every: Every) -> set[int]:
    """Return the steps of the checkpoints to keep at intervals: the first at or after each multiple of `every`.

    These checkpoints are never deleted, so a later call finds the same ones.

    Args:
        checkpoints: The step, epoch, samples and seconds of each checkpoint.
        every: The interval.

    Example:
        >>> steps_at_intervals([{"step": step} for step in (300, 600, 900, 1200, 2100)], Every(1000, "steps"))
        {1200, 2100}
    """
    kept: set[int] = set()
    reached = 0
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint["step"]):
        position = checkpoint.get(_FIELDS[every.unit])
        multiple = 0 if position is None else math.floor(position / every.amount + _ROUNDING)
        if multiple > reached:
            reached = multiple
            kept.add(checkpoint["step"])
    return kept


def steps_to_keep(
    checkpoints: Sequence[Mapping[str, Any]],
    keep_last: int | None,
    keep_best: int,
    keep_every: Every | None = None,
    metric: str | None = None,
    greater_is_better: bool = False,
) -> set[int]:
    """Return the steps of the checkpoints of a run to keep: the newest, the best, and those at an interval.

    The newest and the best checkpoint are always kept. The newest one with NaN or Inf in its weights is kept too, for
    debugging; it counts neither as new nor as good.

    Args:
        checkpoints: The step, metrics, epoch, samples and seconds of each checkpoint.
        keep_last: The number of newest checkpoints to keep; `None` keeps all.
        keep_best: The number of best checkpoints to keep.
        keep_every: An interval at which checkpoints are kept.
        metric: The metric to compare; `None` compares none.
        greater_is_better: Whether higher values of `metric` are better.

    Example:
        >>> saved = [{"step": step, "metrics": {"eval_loss": loss}} for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2))]
        >>> steps_to_keep(saved, keep_last=1, keep_best=1, metric="eval_loss")
        {2, 3}
    """
    if keep_last is None:
        return {checkpoint["step"] for checkpoint in checkpoints}
    finite = [checkpoint for checkpoint in checkpoints if not checkpoint.get("nonfinite")]
    steps = sorted(checkpoint["step"] for checkpoint in finite)
    nonfinite = {checkpoint["step"] for checkpoint in checkpoints} - set(steps)
    kept = {*steps[-keep_last:], *([max(nonfinite)] if nonfinite else [])}
    if keep_every is not None:
        kept |= steps_at_intervals(finite, keep_every)
    return kept | set(best_first(finite, metric, greater_is_better)[: max(keep_best, 1)])


def best_first(checkpoints: Iterable[Mapping[str, Any]], metric: str | None, greater_is_better: bool) -> list[int]:
    """Return the steps of evaluated checkpoints, best first; among equal ones the older comes first."""
    if metric is None:
        return []
    sign = -1 if greater_is_better else 1
    values = {checkpoint["step"]: float(checkpoint["metrics"].get(metric, math.nan)) for checkpoint in checkpoints}
    finite = (step for step, value in values.items() if math.isfinite(value))
    return sorted(finite, key=lambda step: (sign * values[step], step))


def delete_older(paths: Iterable[AnyPath], newest: AnyPath, run_id: str) -> None:
    """Delete older checkpoints of a run once the newest one is complete; warn about those that cannot be deleted.

    Args:
        paths: The checkpoints to delete.
        newest: The checkpoint that was just written. Nothing is deleted unless all its files are complete.
        run_id: The run. Checkpoints of other runs stay.
    """
    try:
        to_delete = [path for path in paths if _belongs_to_run(path, newest, run_id)]
    except UnreachableError as error:
        _logger.warning("No older checkpoint is deleted. %s", error)
        return
    if not to_delete:
        return
    try:
        check_sizes(newest, read_manifest(newest))
    except CheckpointError as error:
        _logger.warning("No older checkpoint is deleted, because the newest one is damaged. %s", error)
        return
    for path in to_delete:
        try:
            delete_state(path)
        except (OSError, CheckpointError) as error:
            _logger.warning("The checkpoint %s could not be deleted: %s.", path, error)


def delete_state(path: AnyPath) -> None:
    """Delete a checkpoint if it exists, and what an interrupted deletion of it left."""
    for folder in (path, replaced_beside(path)):
        storage_of(folder).delete()


def delete_debris(folder: AnyPath) -> None:
    """Delete what interrupted saves and deletions left in a folder of checkpoints."""
    storage_of(folder).delete_debris()


def _belongs_to_run(path: AnyPath, newest: AnyPath, run_id: str) -> bool:
    if path.resolve().parent != newest.resolve().parent:  # the run was moved or copied
        _logger.info("%s is not deleted: it is not in the folder that this run saves to.", path)
        return False
    checkpoint = committed(path)
    if checkpoint is None:
        # An interrupted deletion may have removed the folder and left the rest.
        return not path.exists()
    try:
        owner = read_manifest(checkpoint).run_id
    except CheckpointError as error:
        _logger.info("%s is not deleted: its manifest does not tell which run it belongs to. %s", path, error)
        return False
    if owner not in (None, run_id or None):
        _logger.info("%s is not deleted: it belongs to the run %s.", path, owner)
        return False
    return True
