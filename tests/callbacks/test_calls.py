"""The cost of callbacks per step, counted in Python function calls, which do not depend on the machine's load."""

import functools
import io
import operator
import sys
import time

import pytest

from tests.callbacks.loops import running
from trainer_lib.callbacks import Checkpoint, LearningRateMonitor, ProgressBar, Throughput
from trainer_lib.events import Callback, Dispatcher

STEPS = 2000


def calls_a_step(callbacks: list[Callback], seconds_a_step: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the calls a step of a loop that goes at a given speed, by a clock of its own."""
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", functools.partial(operator.getitem, clock, 0))  # no Python function
    events, run = Dispatcher(callbacks), running(max_steps=STEPS)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    events.fire("on_fit_begin", run)
    listens = events.listens("on_step_end")
    sys.setprofile(count)
    for _ in range(STEPS):
        run.state.step += 1
        clock[0] += seconds_a_step
        if listens:
            events.fire("on_step_end", run)
    sys.setprofile(None)
    events.fire("on_fit_end", run)
    return calls / STEPS


def default_set() -> list[Callback]:
    return [LearningRateMonitor(), Throughput(), Checkpoint()]


def test_without_a_bar_a_step_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_a_step(default_set(), 0.00055, monkeypatch) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds_a_step", "limit", "moves"), [(0.00055, 3, 6), (0.01, 15, 95)])
def test_with_a_bar_a_step_costs_little(
    seconds_a_step: float, limit: int, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    assert calls_a_step([*default_set(), ProgressBar(terminal)], seconds_a_step, monkeypatch) <= limit
    assert moves <= terminal.getvalue().count("\r") <= moves * 1.4  # five a second


def test_with_lines_in_a_file_a_step_costs_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    assert calls_a_step([*default_set(), ProgressBar(file)], 0.01, monkeypatch) == 2
    assert file.getvalue().count("\n") == 1
