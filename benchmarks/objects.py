"""What sending Python objects between two processes takes: `python -m benchmarks.objects`.

Beside torch's own object collectives, which Accelerate and Lightning call too, in turn on the same group.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from trainer_lib import PartialState
from trainer_lib.collectives import broadcast_object_list, gather_object
from trainer_lib.launchers import run_forked

SIZES = {"a number": 0, "a text of 900 bytes": 900, "a text of 10 KB": 10_000, "a text of 1 MB": 1_000_000}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="of each call (default: 300)")
    arguments = parser.parse_args()
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}")
    print("\n| | gather, torch | trainer_lib | broadcast, torch | trainer_lib |\n|---|---:|---:|---:|---:|")
    for name, *milliseconds in run_forked(measure, (arguments.rounds,), num_processes=2, timeout=600)[0]:
        print(f"| {name} | " + " | ".join(f"{value:.2f} ms" for value in milliseconds) + " |")


def measure(rounds: int) -> list[tuple[Any, ...]]:
    """Return the median time of each call, for each size."""
    torch.set_num_threads(1)
    PartialState(cpu=True)
    return [(name, *medians(size, rounds)) for name, size in SIZES.items()]


def medians(size: int, rounds: int) -> list[float]:
    """Return the medians for objects of one size, in milliseconds."""
    sent = "x" * size or 7
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather_object([None, None], sent),
        lambda: gather_object(sent),
        lambda: dist.broadcast_object_list([sent]),
        lambda: broadcast_object_list([sent]),
    ]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [1000 * median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
