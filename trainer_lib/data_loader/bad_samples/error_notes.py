"""This file is what is told beside an error that reading raises: which samples, and which worker."""

import re
import signal
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

_SHOWN = 32
_FROM_WORKER = re.compile(r"in DataLoader worker process (\d+)\.")
_NOTE = re.compile(r"^In (?:sample |one of the samples |the batch of samples ).*$", re.MULTILINE)

SamplesAhead = Callable[[int], list[Any] | None]


def add_notes(error: Exception, samples_ahead: SamplesAhead, iterator: Any, waiting: int) -> None:
    """Name the samples that were being read; the type and text of the error stay as they are.

    Args:
        error: The error.
        samples_ahead: Returns the samples of the batch that is so many batches after the one in hand.
        iterator: The iterator of the loader, if it has workers.
        waiting: How many batches came from the workers and were not handed out yet, once there were any.
    """
    notes = getattr(error, "__notes__", [])
    if any(_NOTE.match(note) for note in notes):
        return
    from_worker = _FROM_WORKER.search(str(error))
    # A worker's error comes as a text, with what was noted there at its end.
    told = _NOTE.findall(str(error)) if from_worker else []
    before = min(waiting, max(getattr(iterator, "_rcvd_idx", 1) - 1, 0))  # the one that failed has arrived too
    if not told and (samples := samples_ahead(1 + before)) is not None:
        told = [f"In the batch of {named(samples)}{f', read by worker {from_worker[1]}' if from_worker else ''}."]
    for note in dict.fromkeys(told):
        error.add_note(note)


def dead_workers(iterator: Any, samples_ahead: SamplesAhead, waiting: int) -> list[str]:
    """Return, in words, which workers of an iterator of torch's died, how, and what they had in hand.

    Args:
        iterator: The iterator of a loader; of one without workers there is nothing to tell.
        samples_ahead: Returns the samples of the batch that is so many batches after the one in hand.
        waiting: How many batches came from the workers and were not handed out yet, once there were any.
    """
    told: list[str] = []
    workers, tasks = getattr(iterator, "_workers", ()), getattr(iterator, "_task_info", {})
    arrived: int = getattr(iterator, "_rcvd_idx", 0)
    for number, worker in enumerate(workers):
        if not worker.exitcode:  # it is there, or was through
            continue
        own = sorted(task for task, info in tasks.items() if info[0] == number and len(info) == 1)
        ahead = [samples_ahead(task - arrived + 1 + min(waiting, arrived)) for task in own]
        in_hand = " and then ".join(named(samples) for samples in ahead if samples is not None)
        having = f" It had to read {in_hand}." if in_hand else ""
        told.append(f"Worker {number} (pid {worker.pid}) {_ended(worker.exitcode)}.{having}")
    return told


def iterator_in(error: BaseException) -> Any:
    """Return the iterator of torch's that raised an error while it was being made, if one did."""
    for frame, _ in walk_tb(error.__traceback__):
        maker = frame.f_locals.get("self")
        if "_task_info" in getattr(maker, "__dict__", ()):
            return maker
    return None


def named(samples: list[Any]) -> str:
    """Return samples in words.

    Example:
        >>> named([3, 4])
        'samples 3, 4'
    """
    more = ", …" if len(samples) > _SHOWN else ""
    return f"samples {', '.join(repr(one) for one in samples[:_SHOWN])}{more}"


def _ended(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", maybe for the memory it took" if name == "SIGKILL" else "")
