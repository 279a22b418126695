"""Notes on errors of data loading: which samples were being read, and by which worker."""

import re
import signal
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any

_SHOWN = 32
_UNTIL_IT_ENDED = 1.0  # seconds that a worker may take to end once its connection broke off
_FROM_WORKER = r"in DataLoader worker process (\d+)\."
_NO_FORK = (
    "Data workers are not forked from this process (the default from Python 3.14 on): they import the script, and "
    'receive the dataset as a pickle. Put what the script does under `if __name__ == "__main__":`, and datasets and '
    'functions at the top level of a module; or call multiprocessing.set_start_method("fork") first.'
)
_NOTE = r"(?m)^In (?:sample |one of the samples |the batch of samples ).*$"

SamplesAhead = Callable[[int], list[Any] | None]


def add_notes(error: Exception, samples_ahead: SamplesAhead, iterator: Any, waiting: int) -> None:
    """Add notes that name the samples being read; the type and text of the error stay the same.

    Args:
        error: The error.
        samples_ahead: Returns the samples of the batch that is so many batches after the current one.
        iterator: The iterator of the loader, if it has workers.
        waiting: How many batches the workers have delivered that were not handed out yet, once there were any.
    """
    notes = getattr(error, "__notes__", [])
    if any(re.match(_NOTE, note) for note in notes):
        return
    from_worker = re.search(_FROM_WORKER, str(error))
    # The error of a worker arrives as a text that ends with the notes added there.
    new_notes = re.findall(_NOTE, str(error)) if from_worker else []
    before = min(waiting, max(getattr(iterator, "_rcvd_idx", 1) - 1, 0))  # the failed batch has arrived too
    if not new_notes and (samples := samples_ahead(1 + before)) is not None:
        worker = f", read by worker {from_worker[1]}" if from_worker else ""
        new_notes = [f"In the batch of {named(samples)}{worker}."]
    for note in dict.fromkeys(new_notes):
        error.add_note(note)


def dead_workers(iterator: Any, samples_ahead: SamplesAhead, waiting: int, is_cut_off: bool = False) -> list[str]:
    """Return a sentence for each worker of torch's iterator that died: how it ended, and what it had to read.

    Args:
        iterator: The iterator of a loader; without workers, the list is empty.
        samples_ahead: Returns the samples of the batch that is so many batches after the current one.
        waiting: How many batches the workers have delivered that were not handed out yet, once there were any.
        is_cut_off: Whether a connection to a worker broke off: its process may end a moment later.
    """
    sentences: list[str] = []
    workers, tasks = getattr(iterator, "_workers", ()), getattr(iterator, "_task_info", {})
    if workers and is_cut_off:
        _wait_for_an_end(workers)
    arrived: int = getattr(iterator, "_rcvd_idx", 0)
    for number, worker in enumerate(workers):
        if not worker.exitcode:  # it is alive, or has finished
            continue
        pending = sorted(task for task, info in tasks.items() if info[0] == number and len(info) == 1)
        batches = [samples_ahead(task - arrived + 1 + min(waiting, arrived)) for task in pending]
        listed = " and then ".join(named(samples) for samples in batches if samples is not None)
        work = f" It had to read {listed}." if listed else ""
        sentences.append(f"Worker {number} (pid {worker.pid}) {_ended(worker.exitcode)}.{work}")
    return sentences


def iterator_in(error: BaseException) -> Any:
    """Return the iterator of torch that raised the error in its constructor, if one did."""
    return next((each for each in _instances_in(error) if "_task_info" in vars(each)), None)


def is_from_start(error: BaseException) -> bool:
    """Whether torch's iterator could not start its workers, or one ended with an error before it sent a batch."""
    iterators: list[Any] = [each for each in _instances_in(error) if "_index_queues" in vars(each)]
    return any(
        "_task_info" not in vars(iterator)
        or (iterator._rcvd_idx == 0 and any(worker.exitcode == 1 for worker in iterator._workers))
        for iterator in iterators
    )


def named(samples: list[Any]) -> str:
    """Return the words that name samples.

    Example:
        >>> named([3, 4])
        'samples 3, 4'
    """
    more = ", …" if len(samples) > _SHOWN else ""
    return f"samples {', '.join(repr(sample) for sample in samples[:_SHOWN])}{more}"


def add_note_on_start(error: BaseException, context: Any) -> None:
    """Add a note to an error of the start of workers that are not forked.

    Args:
        error: The error.
        context: The multiprocessing context of the loader; `None` is Python's default one.
    """
    import multiprocessing

    if (context or multiprocessing).get_start_method() != "fork":
        error.add_note(_NO_FORK)


def _instances_in(error: BaseException) -> list[Any]:
    """Return the objects whose methods an error passed through."""
    instances = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    return [instance for instance in instances if hasattr(instance, "__dict__")]


def _wait_for_an_end(workers: Sequence[Any]) -> None:
    from multiprocessing import connection  # which a pass without errors can do without

    ended = connection.wait([worker.sentinel for worker in workers], _UNTIL_IT_ENDED)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(_UNTIL_IT_ENDED)  # its exit code is there a moment after its files are closed


def _ended(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", maybe because it used too much memory" if name == "SIGKILL" else "")
