"""Meters around a loop: its time, or its number of Python calls."""

import gc
import sys
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.devices import wait_for_gpu


class Meter:
    """A context around the loop alone, so that set-up and the collection of its garbage stay outside.

    A contestant that owns its loop calls `start` and `stop` from its callbacks instead.
    """

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to measure."""
        gc.collect()
        # The heap holds all contestants: a garbage collection costs the same whoever triggers it.
        gc.disable()
        if dist.is_initialized():
            dist.barrier()

    def stop(self) -> None:
        """End measuring."""
        gc.enable()


class Stopwatch(Meter):
    """The seconds of the processor and of the clock on the wall.

    On a GPU the processor's time ends when all is queued, and the other one when all is computed.
    """

    cpu = wall = 0.0
    memory = 0.0  # the most that tensors on a GPU took

    def start(self) -> None:
        """Begin to measure."""
        super().start()
        wait_for_gpu()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """End measuring."""
        self.cpu = time.process_time() - self.cpu
        wait_for_gpu()
        self.wall = time.perf_counter() - self.wall
        if torch.cuda.is_initialized():
            self.memory = torch.cuda.max_memory_allocated()
        super().stop()


class CallCounter(Meter):
    """The calls of Python functions: the same number on a busy machine as on an idle one."""

    calls = 0

    def start(self) -> None:
        """Begin to measure."""
        super().start()
        sys.setprofile(self._count)

    def stop(self) -> None:
        """End measuring."""
        sys.setprofile(None)
        super().stop()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        del frame, argument
        if event == "call":
            self.calls += 1
