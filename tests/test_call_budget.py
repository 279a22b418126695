"""What the engine adds to a step, counted instead of timed, so that a busy machine gives the same answer.

The loops are those of the benchmarks: one written by hand, the same with an `Accelerator`, and that of a `Trainer`.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import trainer_lib
from benchmarks.contestants.bare import Bare
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer import Trainer
from benchmarks.contestants.trainer_lib import TrainerLib
from benchmarks.isolation import isolated
from benchmarks.meters import Meter
from benchmarks.rounds import calls_per_step
from benchmarks.scenarios import Scenario

BUDGET = 620
# On top of the loop by hand, whose own calls (490 with torch 2.13) are torch's and change with its version.
MARGIN = 80

UPDATING = Scenario(name="step", title="", loop="update")
ACCUMULATING = Scenario(name="accumulation", title="", loop="update", settings={"accumulation": 4})
PENDING = Scenario(name="pending", title="", loop="update", settings={"accumulation": 1_000_000})
SCENARIOS = [
    pytest.param(UPDATING, id="each micro-batch updates"),
    pytest.param(ACCUMULATING, id="each fourth micro-batch updates"),
    pytest.param(PENDING, id="no micro-batch updates"),
]

# A bar looks at the clock in each step, and draws a few times in so many, the more the slower the machine is.
TRAINER_BUDGET, TRAINER_MARGIN, BAR_MARGIN = 700, 60, 14
FITTING = Scenario(name="fit", title="", loop="fit")
FITTING_WITH_BAR = Scenario(name="fit-bar", title="", loop="fit", settings={"bar": True})
FITTING_IN_WINDOWS = Scenario(name="fit-accumulation", title="", loop="fit", settings={"accumulation": 4})
FITS = [
    pytest.param(FITTING, id="each batch updates"),
    pytest.param(FITTING_IN_WINDOWS, id="each fourth batch updates"),
]


class CallsByFile(Meter):
    """Counts the calls of Python functions by the file that defines them."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def start(self) -> None:
        super().start()
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)
        super().stop()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.seen[frame.f_code.co_filename] += 1


class Operations(Meter):
    """Counts what torch is asked to do, a read of a tensor's value included (`aten._local_scalar_dense`)."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._mode = _Counting(self.seen)

    def start(self) -> None:
        super().start()
        self._mode.__enter__()

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)
        super().stop()


class _Counting(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def seen_in_16_steps(kind: type[CallsByFile | Operations], contestant: Contestant, scenario: Scenario) -> Counter[str]:
    """Count by kind what 16 steps in the middle of a loop do."""
    short, long = kind(), kind()
    for steps, meter in ((16, short), (32, long)):
        with isolated():
            getattr(contestant, scenario.loop)(scenario.task(steps), meter)
        contestant.reset()
    return long.seen - short.seen


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_stays_within_its_budget_of_calls(scenario: Scenario) -> None:
    by_hand, engine = calls_per_step(Bare(), scenario), calls_per_step(TrainerLib(), scenario)
    assert engine <= by_hand + MARGIN
    assert engine <= BUDGET


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_asks_torch_for_nothing_that_the_loop_by_hand_does_not(scenario: Scenario) -> None:
    by_hand, engine = (seen_in_16_steps(Operations, contestant, scenario) for contestant in (Bare(), TrainerLib()))
    assert engine - by_hand == Counter()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_adds_calls_of_the_library_alone(scenario: Scenario) -> None:
    """No look at the environment, for a package, at a signature, a device or the modules of a model."""
    by_hand, engine = (seen_in_16_steps(CallsByFile, contestant, scenario) for contestant in (Bare(), TrainerLib()))
    library = Path(trainer_lib.__file__).parent
    standard = {"contextlib.py", "symbolic_shapes.py"}  # the latter: torch compares a loss's shape with its gradient's
    added = {name: count for name, count in (engine - by_hand).items() if Path(name).name not in standard}
    assert added
    assert [name for name in added if not Path(name).is_relative_to(library)] == []


@pytest.mark.parametrize("scenario", FITS)
def test_a_step_of_a_trainer_stays_within_its_budget_of_calls(scenario: Scenario) -> None:
    by_hand, trainer = calls_per_step(Bare(), scenario), calls_per_step(Trainer(), scenario)
    assert trainer <= by_hand + TRAINER_MARGIN
    assert trainer <= TRAINER_BUDGET


def test_a_progress_bar_looks_at_the_clock_and_no_more() -> None:
    assert calls_per_step(Trainer(), FITTING_WITH_BAR) <= calls_per_step(Trainer(), FITTING) + BAR_MARGIN


@pytest.mark.parametrize(("scenario", "updates"), [(FITTING, 16), (FITTING_IN_WINDOWS, 4)])
def test_a_step_of_a_trainer_asks_torch_for_loss_and_norm_and_no_more(scenario: Scenario, updates: int) -> None:
    """On the host, where there is nothing to wait for: a loss before it is learned from and for the log."""
    by_hand, trainer = (seen_in_16_steps(Operations, contestant, scenario) for contestant in (Bare(), Trainer()))
    assert trainer - by_hand == Counter({"aten._local_scalar_dense.default": 2 * 16 + updates})
