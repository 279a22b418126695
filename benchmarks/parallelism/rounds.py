"""The measurement: by hand, by hand again, and this library take turns in the processes of one world."""

import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.isolation import isolated
from benchmarks.parallelism.by_hand import by_hand
from benchmarks.parallelism.messages import Message, Messages
from benchmarks.parallelism.ours import OURS
from benchmarks.parallelism.task import MESHES, Mesh, Shape

BY_HAND, AGAIN = "by hand", "by hand, again"
_WARM = 2  # steps


class Result(NamedTuple):
    """The CPU seconds of a step, summed over the ranks, in each round, by contestant; and its messages on rank 0."""

    seconds: dict[str, list[float]]
    messages: dict[str, Counter[Message]]

    def milliseconds(self, name: str) -> float:
        """Return the median."""
        return median(self.seconds[name]) * 1000

    def ratio(self, name: str) -> float:
        """Return the median of the ratios to the loop by hand of the same round."""
        return median(mine / bare for mine, bare in zip(self.seconds[name], self.seconds[BY_HAND], strict=True))


class Turns:
    """Measures bursts of steps of this library, and between them bursts of the others.

    Args:
        others: The steps of the others.
        name: The name of this library's contestant.
        rounds: The number of rounds.
        steps: The steps of a burst.
    """

    def __init__(self, others: dict[str, Callable[[], Any]], name: str, rounds: int, steps: int) -> None:
        self.seconds: dict[str, list[float]] = {label: [] for label in (*others, name)}
        self.messages: dict[str, Counter[Message]] = {}
        self._others, self._name, self._rounds, self._steps = others, name, rounds, steps
        self._done, self._start, self._counted = 0, 0.0, Messages()
        self.total_steps = _WARM + 1 + rounds * steps

    def after_step(self) -> None:
        """Continue; called after each step of this library's contestant."""
        self._done += 1
        if self._done == _WARM:
            for label, step in self._others.items():
                for _ in range(_WARM):
                    step()
                with Messages() as messages:
                    step()
                self.messages[label] = messages.counts
            self._counted.__enter__()
        elif self._done == _WARM + 1:
            self._counted.__exit__(None, None, None)
            self.messages[self._name] = self._counted.counts
            self._start = _begin() if self._rounds else 0.0
        elif (self._done - _WARM - 1) % self._steps == 0:
            self.seconds[self._name].append(self._end(self._start))
            for label, step in self._others.items():
                start = _begin()
                for _ in range(self._steps):
                    step()
                self.seconds[label].append(self._end(start))
            self._start = _begin()

    def _end(self, start: float) -> float:
        seconds = torch.tensor((time.process_time() - start) / self._steps, dtype=torch.float64)
        gc.enable()
        dist.all_reduce(seconds)
        return float(seconds)


def _begin() -> float:
    gc.collect()
    gc.disable()
    dist.barrier()
    return time.process_time()


def measure(mesh: Mesh, shape: Shape, name: str, rounds: int, steps: int) -> Result:
    """Measure a contestant of this library beside the loop by hand, in the world of this process."""
    step = by_hand(mesh, shape)
    turns = Turns({BY_HAND: step, AGAIN: step}, name, rounds, steps)
    OURS[name](mesh, shape, turns.total_steps, turns.after_step)
    return Result(turns.seconds, turns.messages)


def measure_in_world(mesh: Mesh, shape: Shape, name: str, rounds: int, steps: int) -> Result:
    """Measure in as many processes as the mesh has."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (Path(folder), mesh.name, shape, name, rounds, steps), nprocs=mesh.num_ranks)
        return torch.load(Path(folder) / "result", weights_only=False)


def _work(rank: int, folder: Path, mesh: str, shape: Shape, name: str, rounds: int, steps: int) -> None:
    size = str(MESHES[mesh].num_ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=int(size))
    with isolated():
        result = measure(MESHES[mesh], shape, name, rounds, steps)
    if rank == 0:
        torch.save(result, folder / "result")
    dist.barrier()
    dist.destroy_process_group()
