"""This file is which checkpoints of a run stay at intervals, and deleting those that do not: its own, and no others."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trainer_lib.checkpointing.format.layout import committed
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.load.verification import check_sizes
from trainer_lib.checkpointing.save.automatic_naming import delete_state
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_FIELDS = {"steps": "step", "epochs": "epoch", "samples": "samples", "seconds": "seconds"}
_TINY = 1e-9  # what a sum of parts of an epoch may be off by


def steps_at_intervals(checkpoints: Iterable[Mapping[str, Any]], every: Every) -> set[int]:
    """Return the steps of those checkpoints that are the first at or after each multiple of an amount.

    As they stay, the same ones are the first whenever it is asked.

    Args:
        checkpoints: What is known of each: its step, epoch, samples and seconds.
        every: The amount.

    Example:
        >>> steps_at_intervals([{"step": step} for step in (300, 600, 900, 1200, 2100)], Every(1000, "steps"))
        {1200, 2100}
    """
    kept: set[int] = set()
    reached = 0
    for one in sorted(checkpoints, key=lambda one: one["step"]):
        position = one.get(_FIELDS[every.unit])
        multiple = 0 if position is None else math.floor(position / every.amount + _TINY)
        if multiple > reached:
            reached = multiple
            kept.add(one["step"])
    return kept


def delete_older(paths: Iterable[AnyPath], newest: AnyPath, run_id: str) -> None:
    """Delete checkpoints of a run, once a newer one is there; what cannot be deleted is told.

    Args:
        paths: The checkpoints.
        newest: The one just written, which has to be there in full length.
        run_id: The run.
    """
    try:
        going = [path for path in paths if _is_own(path, newest, run_id)]
    except UnreachableError as error:
        _logger.warning("No older checkpoint is deleted. %s", error)
        return
    if not going:
        return
    try:
        check_sizes(newest, read_manifest(newest))
    except CheckpointError as error:
        _logger.warning("No older checkpoint is deleted, as the newest is not as it was written. %s", error)
        return
    for path in going:
        try:
            delete_state(path)
        except (OSError, CheckpointError) as error:
            _logger.warning("The checkpoint %s could not be deleted: %s.", path, error)


def _is_own(path: AnyPath, newest: AnyPath, run_id: str) -> bool:
    if path.resolve().parent != newest.resolve().parent:  # of a run that was moved or copied
        _logger.info("%s lies elsewhere than the checkpoints of now, and stays.", path)
        return False
    there = committed(path)
    if there is None:
        # Nothing may be left of it but what a deletion that was cut short did not get to.
        return not path.exists()
    try:
        of_run = read_manifest(there).run_id
    except CheckpointError as error:
        _logger.info("%s stays, as whose it is cannot be told. %s", path, error)
        return False
    if of_run not in (None, run_id or None):
        _logger.info("%s is of the run %s, and stays.", path, of_run)
        return False
    return True
