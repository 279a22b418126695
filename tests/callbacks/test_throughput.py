"""Tests of training speed in the log."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.callbacks.loops import running
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import Throughput
from trainer_lib.events import Dispatcher, Run
from trainer_lib.events.callback import EVENTS


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def advance(run: Run, clock: Clock, steps: int, seconds: float) -> None:
    run.state.step += steps
    run.state.samples += 8 * steps
    clock.now += seconds


def log(events: Dispatcher, run: Run) -> dict[str, float]:
    values: dict[str, float] = {}
    events.fire("on_log", run, values)
    return values


def test_speeds_are_those_since_the_last_log(clock: Clock) -> None:
    events, run = Dispatcher([Throughput()]), running(step=100, samples=800)
    events.fire("on_fit_begin", run)
    advance(run, clock, 10, 2.0)
    assert log(events, run) == {"samples_per_second": 40.0, "steps_per_second": 5.0}
    advance(run, clock, 10, 1.0)
    assert log(events, run) == {"samples_per_second": 80.0, "steps_per_second": 10.0}
    assert log(events, run) == {}  # nothing was done since


def test_the_share_of_time_that_batches_are_waited_for(clock: Clock) -> None:
    class Slow(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            clock.now += 0.25
            return index

    run = running()
    run.accelerator = Accelerator(cpu=True)
    loader = run.accelerator.prepare(DataLoader(Slow(), batch_size=1))
    throughput = Throughput()
    events, shares = Dispatcher([throughput]), list[float]()
    events.fire("on_fit_begin", run)
    for _ in loader:
        advance(run, clock, 1, 0.75)
        if run.state.step % 4 == 0:
            shares.append(log(events, run)["data_wait"])
    assert shares == [0.25, 0.25]
    loader.dataset[0]
    advance(run, clock, 1, 0.75)
    assert log(events, run) == {"samples_per_second": 8.0, "steps_per_second": 1.0, "data_wait": 0.0}
    events.fire("on_fit_end", run)
    assert throughput.summary()["data_wait"] == 2.0 / 9.0


def test_a_loader_without_a_length_is_waited_for_too(clock: Clock) -> None:
    class Slow(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(5):  # one is read ahead
                clock.now += 0.25
                yield number

    run = running()
    run.accelerator = Accelerator(cpu=True)
    loader = run.accelerator.prepare(DataLoader(Slow(), batch_size=1))
    throughput, shares = Throughput(), list[float]()
    throughput.on_fit_begin(run)
    for _ in loader:
        advance(run, clock, 1, 0.75)
        values: dict[str, float] = {}
        throughput.on_log(run, values)
        shares.append(values["data_wait"])
    assert shares[1:4] == [0.25] * 3


def test_evaluations_and_saving_do_not_count(clock: Clock) -> None:
    throughput, run = Throughput(), running()
    events = Dispatcher([throughput])
    events.fire("on_fit_begin", run)
    advance(run, clock, 10, 1.0)
    events.fire("on_evaluate_begin", run)
    clock.now += 30.0
    events.fire("on_evaluate_end", run, {})
    events.fire("on_save_begin", run, Path("x"))
    clock.now += 7.0
    run.saving_seconds += 7.0  # the checkpoint is copied, and is written while training continues
    advance(run, clock, 10, 1.0)
    events.fire("on_save_end", run, Path("x"))
    assert log(events, run) == {"samples_per_second": 80.0, "steps_per_second": 10.0}
    advance(run, clock, 10, 3.0)
    events.fire("on_fit_end", run)
    events.fire("on_evaluate_begin", run)  # a last one, of its own
    clock.now += 30.0
    events.fire("on_evaluate_end", run, {})
    assert throughput.summary() == {
        "steps": 30,
        "samples": 240,
        "seconds": 5.0,
        "evaluation_seconds": 30.0,
        "saving_seconds": 7.0,
        "samples_per_second": 48.0,
        "steps_per_second": 6.0,
    }


def test_a_second_run_starts_fresh(clock: Clock) -> None:
    throughput = Throughput(tokens=lambda batch: 5)
    events = Dispatcher([throughput])
    for _ in range(2):
        run = running()
        events.fire("on_fit_begin", run)
        run.batch = "any"
        events.fire("on_micro_batch_end", run)
        events.fire("on_evaluate_begin", run)
        clock.now += 3.0
        events.fire("on_evaluate_end", run, {})
        advance(run, clock, 4, 2.0)
        events.fire("on_fit_end", run)
        summary = throughput.summary()
        assert (summary["steps"], summary["seconds"], summary["evaluation_seconds"]) == (4, 2.0, 3.0)
        assert (summary["tokens"], summary["tokens_per_second"]) == (5.0, 2.5)


def test_tokens_are_counted_on_their_device_and_read_at_logs(clock: Clock) -> None:
    def tokens(batch: Any) -> torch.Tensor:
        return batch["attention_mask"].sum()

    throughput, run = Throughput(tokens=tokens), running()
    events = Dispatcher([throughput])
    events.fire("on_fit_begin", run)
    for length in (3, 5):
        run.batch = {"attention_mask": torch.ones(2, length, dtype=torch.long)}
        events.fire("on_micro_batch_end", run)
        assert isinstance(throughput._tokens, torch.Tensor)
    advance(run, clock, 1, 2.0)
    assert log(events, run)["tokens_per_second"] == 8.0
    assert throughput.summary()["tokens"] == 16.0


def test_it_does_nothing_in_a_step_unless_it_counts_tokens() -> None:
    assert not [event for event in EVENTS if Dispatcher([Throughput()]).listens(event) and "step" in event]
    assert not Dispatcher([Throughput()]).listens("on_micro_batch_end")


def test_speeds_are_those_of_all_processes_and_per_device_on_request() -> None:
    def body() -> dict[str, float]:
        run = running()
        run.accelerator = Accelerator(cpu=True)
        events = Dispatcher([Throughput(tokens=lambda batch: 3, per_device=True)])
        events.fire("on_fit_begin", run)
        events.fire("on_micro_batch_end", run)
        run.state.step, run.state.samples = 1, 12  # of both
        return log(events, run)

    for values in run_world(body, timeout=60):
        assert values["samples_per_second"] == pytest.approx(12 * values["steps_per_second"])
        assert values["tokens_per_second"] == pytest.approx(6 * values["steps_per_second"])
        assert values["samples_per_second_per_device"] == pytest.approx(6 * values["steps_per_second"])
