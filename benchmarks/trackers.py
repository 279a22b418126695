"""The cost of trackers: `python -m benchmarks.trackers`.

The same training with TensorBoard, MLflow (a database) and lines of JSON, logging each 10 steps, and with none; the two
take turns. The clock runs from the first step to the last: what begins and ends trackers is told beside it.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from benchmarks import machine
from benchmarks.task import BATCH_SIZE, Task, optimization
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import LambdaCallback, MLflowCallback, TensorBoardCallback, TrackerCallback
from trainer_lib.tracking import Patience, TrackerGroup


class Run(NamedTuple):
    """What a run took: seconds of its steps by the clock, and of the training's thread; and of all of `fit`."""

    wall: float
    cpu: float
    fit: float


def main() -> None:
    """Measure, and print figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trackers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each runs (default: 9)")
    parser.add_argument("--steps", type=int, default=10_000, help="of a run (default: 10000)")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)  # as in the other benchmarks; a processor is left for what trackers do meanwhile
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        enqueueing(Path(folder))
        runs(Path(folder), arguments.rounds, arguments.steps)


def enqueueing(folder: Path) -> None:
    """Measure what a log costs the step's thread, without what the other threads do meanwhile."""
    values = {f"value_{number}": number / 7 for number in range(10)}
    for names in (["jsonl"], ["tensorboard", "jsonl"]):
        patience = Patience(linger=3600.0)
        trackers = TrackerGroup(names, "enqueue", folder, patience=patience)
        each: list[float] = []
        for step in range(5000):
            begun = time.perf_counter()
            trackers.log(values, step)
            each.append(time.perf_counter() - begun)
        trackers.finish()
        print(f"a log of ten scalars, {len(names)} tracker(s): median {median(each) * 1e6:.1f} µs (at most 20)")


def runs(folder: Path, rounds: int, steps: int) -> None:
    """Measure runs with and without trackers, in turns."""
    database = f"sqlite:///{folder / 'ml.db'}"

    def trackers() -> list[Any]:
        return [
            TensorBoardCallback(folder=folder / "tensorboard"),
            TrackerCallback("jsonl", folder=folder / "jsonl"),
            MLflowCallback("benchmark", tracking_uri=database),
        ]

    run(trackers, 200)  # makes the database, and warms up
    run(list, 200)
    pairs: list[tuple[Run, Run]] = []
    for number in range(rounds):
        if number % 2:
            without = run(list, steps)
            pairs.append((run(trackers, steps), without))
        else:
            pairs.append((run(trackers, steps), run(list, steps)))
    for name in Run._fields:
        ratios = sorted(getattr(having, name) / getattr(none, name) for having, none in pairs)
        calm = min(getattr(having, name) for having, _ in pairs) / min(getattr(none, name) for _, none in pairs)
        print(
            f"{name}: with trackers to none, median {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
            f"of the fastest {calm:.3f}"
        )


def run(make: Callable[[], list[Any]], steps: int) -> Run:
    """Train, and return what it took."""
    times: dict[str, tuple[float, float]] = {}

    def note(name: str) -> Callable[[Any], None]:
        return lambda run: times.__setitem__(name, (time.perf_counter(), time.thread_time()))

    clock = LambdaCallback(on_epoch_begin=note("begin"), on_epoch_end=note("end"))
    task = Task(steps=steps)
    model = task.model()
    optimizer, scheduler = optimization(model)
    arguments = TrainingArguments(
        num_train_epochs=1,
        log_every="10 steps",
        per_device_train_batch_size=BATCH_SIZE,
        progress_bar=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=task.loader(),
        loss_fn=cross_entropy,
        optimizer=optimizer,
        scheduler=scheduler,
        callbacks=[clock, *make()],
    )
    begun = time.perf_counter()
    trainer.fit()
    fit = time.perf_counter() - begun
    trainer.accelerator.free_memory()
    (wall, cpu), (wall_end, cpu_end) = times["begin"], times["end"]
    return Run(wall_end - wall, cpu_end - cpu, fit)


if __name__ == "__main__":
    main()
