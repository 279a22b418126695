"""The number of worker processes that read data, chosen by how long a batch takes to read."""

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.data_loader.readers.probe import samples_at
from trainer_lib.foundation.lengths import length_of
from trainer_lib.processes.numa_affinity import get_cpu_distributed_information

_HANDOVER = 0.002  # seconds: what a worker takes to hand a batch over, with a margin
_MOST = 8


class WorkerCount(NamedTuple):
    """A number of worker processes, and why it was chosen."""

    workers: int
    reason: str


def measured_workers(dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any]) -> WorkerCount:
    """Return how many workers read a dataset best: none if its batches are read faster than a worker hands them over.

    Args:
        dataset: The dataset; one that cannot be read by index gets no workers, as their number would change its order.
        batch_size: The samples in a batch.
        collate_fn: Collates a list of samples.

    Example:
        >>> measured_workers({1, 2, 3}, 2, list)
        WorkerCount(workers=0, reason='the dataset cannot be read by index')
    """
    size = length_of(dataset)
    seconds = (
        _seconds_to_read(dataset, batch_size, collate_fn, size) if size and hasattr(dataset, "__getitem__") else None
    )
    if seconds is None:
        return WorkerCount(0, "the dataset cannot be read by index")
    measured = f"a batch takes {seconds * 1000:.1f} ms to read"
    cores = len(os.sched_getaffinity(0)) // get_cpu_distributed_information().local_world_size
    if seconds < _HANDOVER or cores < 2:
        return WorkerCount(0, measured + (", and a rank has one core" if cores < 2 else ""))
    return WorkerCount(
        min(cores - 1, _MOST, math.ceil(seconds / _HANDOVER)), f"{measured}, and a rank has {cores} cores"
    )


def _seconds_to_read(dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any], size: int) -> float | None:
    """Return the seconds of the faster of two batches, as the first may open files; `None` if they cannot be read."""
    times: list[float] = []
    for first in (0, size // 2):
        keys = [(first + offset) % size for offset in range(batch_size)]
        began = time.perf_counter()
        samples = samples_at(dataset, keys)
        if samples is None:
            return None
        with RandomStream(0):  # it may draw, as masks for language models do
            collate_fn(samples)
        times.append(time.perf_counter() - began)
    return min(times)
