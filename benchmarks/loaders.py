"""Prepared loaders beside plain ones: `python -m benchmarks.loaders`.

Narrow samples and wide ones, in order and shuffled, read by the process itself and by two workers. Both loaders take
turns and give the same samples. The last figure is the time from the position in the middle of 10⁹ samples to the first
batch after it, in a computed order.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks import machine, report
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer_lib import forget_state
from benchmarks.docstrings import docstrings
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.meters import Meter, Stopwatch
from benchmarks.rounds import run
from benchmarks.scenarios import Scenario
from benchmarks.task import BATCH_SIZE, Task, labels_sum

NARROW, WIDE = 64, 3 * 96 * 96
MANY = 10**9
TARGET = "time ≤ 1.03"


class Samples(Dataset[Any]):
    """Samples that a class of the user reads one by one."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


Make = Callable[[Tensor, Tensor], Dataset[Any]]
KINDS: list[tuple[str, Make, int, int]] = [
    ("Samples of a class", Samples, NARROW, 400),
    ("Samples of a class", Samples, WIDE, 40),
    ("A TensorDataset", TensorDataset, NARROW, 400),
    ("A TensorDataset", TensorDataset, WIDE, 40),
]


class Plain(Contestant):
    """A DataLoader of torch."""

    name = "plain"

    def __init__(self, make: Make, features: int, shuffle: bool, workers: int) -> None:
        self.make, self.features, self.shuffle, self.workers = make, features, shuffle, workers

    def read(self, task: Task, meter: Meter) -> float:
        """Go through the data."""
        loader = self.loader(task)
        total = labels_sum([labels for _, labels in loader])  # also starts the workers
        with meter:
            for _ in loader:
                pass
        return total

    def loader(self, task: Task) -> Any:
        """Return the loader."""
        rows = task.steps * BATCH_SIZE
        return DataLoader(
            self.make(torch.zeros(rows, self.features), torch.arange(rows)),
            batch_size=BATCH_SIZE,
            shuffle=self.shuffle,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
        )


class Prepared(Plain):
    """The same loader, prepared."""

    name = "trainer_lib"

    def loader(self, task: Task) -> Any:
        """Return the loader."""
        from trainer_lib import Accelerator

        return Accelerator(cpu=True).prepare(super().loader(task))

    def reset(self) -> None:
        """Forget the state that all objects share."""
        forget_state()


class Numbers(Dataset[int]):
    """So many numbers."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loaders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="how often each loader is read (default: 21)")
    arguments = parser.parse_args()
    comparisons = [
        compare_loaders(kind, shuffle, workers, arguments.rounds)
        for kind in KINDS
        for shuffle in (False, True)
        for workers in (0, 2)
    ]
    print(f"{report.table(comparisons)}\n\n{machine.describe()}; {arguments.rounds} rounds\n")
    by_length, shuffled = fill(is_grouped=True), fill(is_grouped=False)
    print(f"docstrings in batches of 8: {by_length:.3f} of the positions are filled by length, {shuffled:.3f} shuffled")
    milliseconds = seconds_to_the_middle() * 1e3
    print(f"to the middle of {MANY:,} samples in a computed order: {milliseconds:.2f} ms (target: 10 ms)")


def compare_loaders(kind: tuple[str, Make, int, int], shuffle: bool, workers: int, rounds: int) -> Comparison:
    """Read a plain loader and a prepared one in turn."""
    name, make, features, steps = kind
    order, readers = "shuffled" if shuffle else "in order", f"{workers} workers" if workers else "no workers"
    title = f"{name}, {features:,} numbers each, {order}, {readers}, for each batch of {BATCH_SIZE}"
    scenario = Scenario(name=title, title=title, loop="read", target=TARGET, steps=steps)
    samples: dict[type[Plain], list[Sample]] = {Plain: [], Prepared: []}
    for index in range(rounds + 1):
        turns = [Plain, Prepared] if index % 2 else [Prepared, Plain]
        sums: set[float] = set()
        for contestant in turns:
            watch = Stopwatch()
            sums.add(run(contestant(make, features, shuffle, workers), scenario, steps, watch))
            if index:  # the first round warms up
                samples[contestant].append(Sample(watch.cpu / steps, watch.wall / steps))
        assert len(sums) == 1, f"The loaders gave different samples: {sums}"
    rows = [
        Row(
            contestant=contestant.name,
            samples=taken,
            baseline=samples[Plain],
            target=TARGET if contestant is Prepared else "",
        )
        for contestant, taken in samples.items()
    ]
    return Comparison(name=scenario.name, title=title, rows=rows)


def seconds_to_the_middle(times: int = 15) -> float:
    """Return how long it takes from the position in a checkpoint to the first batch after it."""
    from trainer_lib import Accelerator
    from trainer_lib.utils import DataLoaderConfiguration

    def loader() -> Any:
        config = DataLoaderConfiguration(low_memory_shuffle=True)
        return Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Numbers(), BATCH_SIZE, shuffle=True))

    interrupted = loader()
    reading = iter(interrupted)
    next(reading)
    state = interrupted.state_dict() | {"position": MANY // 2 // BATCH_SIZE * BATCH_SIZE}
    reading.close()
    seconds: list[float] = []
    batches: list[list[int]] = []
    for _ in range(times):
        forget_state()
        resumed = loader()
        begun = time.perf_counter()
        resumed.load_state_dict(state)
        reading = iter(resumed)
        batches.append(next(reading).tolist())
        seconds.append(time.perf_counter() - begun)
        reading.close()
    assert all(batch == batches[0] for batch in batches)
    return median(seconds)


def fill(is_grouped: bool) -> float:
    """Return the share of positions that are no padding in batches of docstrings."""
    from trainer_lib.trainer.data.train_samplers import LengthGroupedSampler

    lengths = [min(len(words), 512) for words in docstrings()]
    order = list(LengthGroupedSampler(lengths, seed=0)) if is_grouped else torch.randperm(len(lengths)).tolist()
    batches = [[lengths[index] for index in order[first : first + 8]] for first in range(0, len(order), 8)]
    return sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


if __name__ == "__main__":
    sys.exit(main())
