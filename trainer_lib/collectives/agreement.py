"""This file is doing something on all processes together: it has worked on all of them, or failed on all."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from trainer_lib.foundation.errors import CheckpointError, UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup

_logger = get_logger(__name__)

# Seconds after which a process that waits for the others says so.
PATIENCE = 60.0


@contextmanager
def together(group: ProcessGroup, doing: str) -> Generator[None]:
    """Run a block on all processes, and make an error on one of them an error on all.

    Args:
        group: The processes.
        doing: What the block is part of: the call that the user made.

    Raises:
        CheckpointError: Where another process failed; the one that failed raises what it was.
        UnwritableError: The same, if it is the disk that failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others wait for this process
        error = caught
    told = None if error is None else (isinstance(error, UnwritableError), f"{type(error).__name__}: {error}")
    reports = exchange(group, told, doing)
    failures = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    # All do the same about it: only what every failure lays to the disk is laid to it.
    kind = UnwritableError if all(is_unwritable for _, is_unwritable, _ in failures) else CheckpointError
    if isinstance(error, UnwritableError) and kind is CheckpointError:
        raise CheckpointError(str(error)) from error
    if error is not None:
        raise error
    for rank, _, report in failures:
        raise kind(f"{doing} failed on process {rank}. {report}")


def exchange(group: ProcessGroup, value: Any, doing: str) -> list[Any]:
    """Return the values of all processes.

    Raises:
        CheckpointError: If they do not all do the same.
    """
    if group.size == 1:
        return [value]
    waiting = threading.Timer(PATIENCE, _complain, [group.rank, doing])
    waiting.daemon = True
    waiting.start()
    try:
        reports = group.all_gather_objects((doing, value))
    finally:
        waiting.cancel()
    for rank, (other, _) in enumerate(reports):
        if other != doing:
            raise CheckpointError(f"Process {group.rank} is in {doing} and process {rank} in {other}.")
    return [value for _, value in reports]


def _complain(rank: int, doing: str) -> None:
    _logger.warning(
        "Process %d has waited %g seconds in %s for the others. All processes have to call it: "
        "is it inside `if accelerator.is_main_process`?",
        rank,
        PATIENCE,
        doing,
        main_process_only=False,
    )
