"""What the engine adds to a step, counted instead of timed, so that a busy machine gives the same answer.

The loops are those of the benchmarks: one written by hand, the same with an `Accelerator`, and that of a `Trainer`.
"""

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import trainer_lib
from benchmarks.contestants.bare import Bare
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer import Trainer
from benchmarks.contestants.trainer_lib import TrainerLib
from benchmarks.meters import Meter
from benchmarks.rounds import run
from benchmarks.scenarios import SCENARIOS, Scenario
from tests.worlds import run_world
from trainer_lib import PartialState, TrainingArguments
from trainer_lib.callbacks import EMA
from trainer_lib.data_loader.order import held_generators
from trainer_lib.data_loader.order.held_generators import HeldGenerators
from trainer_lib.foundation import compiler_import

BUDGET = 620
# On top of the loop by hand, whose own calls (490 with torch 2.13) are torch's and change with its version.
MARGIN = 80
BAR_MARGIN = 14

UPDATING = Scenario(name="step", title="", loop="update")
ACCUMULATING = Scenario(name="accumulation", title="", loop="update", settings={"accumulation": 4})
PENDING = Scenario(name="pending", title="", loop="update", settings={"accumulation": 1_000_000})
ENGINE_SCENARIOS = [
    pytest.param(UPDATING, id="each micro-batch updates"),
    pytest.param(ACCUMULATING, id="each fourth micro-batch updates"),
    pytest.param(PENDING, id="no micro-batch updates"),
]

BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, UPDATING, ACCUMULATING, PENDING)}
FITTING, FITTING_WITH_BAR, FITTING_IN_WINDOWS = (BY_NAME[name] for name in ("fit", "fit-bar", "fit-accumulation"))
# The calls of this library's functions for each batch, in every shape of a task; one call more for each update fails.
LIBRARY_CALLS = {
    "fit": 94,
    "fit-callable": 98,
    "fit-dict": 108,
    "fit-model-loss": 109,
    "fit-llama": 119,
    "fit-folder": 97,
    "fit-accumulation": 51.8,
    "fit-callable-accumulation": 55.8,
}
ACCUMULATION_MARGIN = 26  # for each batch, beyond the loop by hand, which does next to nothing where no batch updates

AVERAGING_FILES = {"weight_averaging.py", "local_shards.py"}

# A batch of a TensorDataset is read column by column, through numpy; the loop by hand selects and stacks each sample.
READING = Counter({"aten.detach.default": 2 * 16, "aten.lift_fresh.default": 2 * 16})

# The steps of the shorter and the longer run: what a loop costs once, at its start and end, drops out.
FEW = (16, 32)
WITH_A_LOG = (40, 120)  # a Trainer logs after step 100


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


def seen(
    kind: type[CallsByFile | Operations],
    contestant: type[Contestant],
    scenario: Scenario,
    steps: tuple[int, int] = FEW,
) -> Counter[str]:
    """Count by kind what the steps do by which the longer run is longer."""
    return _seen(kind, contestant, scenario.name, steps)


def calls_per_step(contestant: type[Contestant], scenario: Scenario, steps: tuple[int, int] = FEW) -> float:
    return seen(CallsByFile, contestant, scenario, steps).total() / (steps[1] - steps[0])


def library_calls(calls: Counter[str]) -> int:
    """Return how many of the calls are of functions of this library.

    Not counted is what stands in for a function of torch, unless another test has imported torch's compiler before.
    """
    library = Path(trainer_lib.__file__).parent
    folders = library, (library / "callbacks").resolve()
    counted = (count for name, count in calls.items() if name != compiler_import.__file__ and _is_in(name, folders))
    return sum(counted)


def _is_in(name: str, folders: Sequence[Path]) -> bool:
    return any(map(Path(name).is_relative_to, folders))


@cache  # several tests look at the same steps
def _seen(
    kind: type[CallsByFile | Operations], contestant: type[Contestant], name: str, steps: tuple[int, int]
) -> Counter[str]:
    short, long = kind(), kind()
    gc.freeze()  # a collection before each run need not go through what other tests have imported
    try:
        run(contestant(), BY_NAME[name], 4, Meter())  # what only the first run of a process does is not counted
        for length, meter in zip(steps, (short, long), strict=True):
            run(contestant(), BY_NAME[name], length, meter)
    finally:
        gc.unfreeze()
    return long.seen - short.seen


@pytest.mark.parametrize("scenario", ENGINE_SCENARIOS)
def test_a_step_stays_within_its_budget_of_calls(scenario: Scenario) -> None:
    by_hand, engine = calls_per_step(Bare, scenario), calls_per_step(TrainerLib, scenario)
    assert engine <= by_hand + MARGIN
    assert engine <= BUDGET


@pytest.mark.parametrize("scenario", ENGINE_SCENARIOS)
def test_a_step_asks_torch_for_nothing_that_the_loop_by_hand_does_not(scenario: Scenario) -> None:
    by_hand, engine = (seen(Operations, contestant, scenario) for contestant in (Bare, TrainerLib))
    assert by_hand
    assert engine - by_hand - READING == Counter()


@pytest.mark.parametrize("scenario", ENGINE_SCENARIOS)
def test_a_step_adds_calls_of_the_library_alone(scenario: Scenario) -> None:
    """No look at the environment, for a package, at a signature, a device or the modules of a model."""
    by_hand, engine = (seen(CallsByFile, contestant, scenario) for contestant in (Bare, TrainerLib))
    library = Path(trainer_lib.__file__).parent
    standard = {"contextlib.py", "symbolic_shapes.py"}  # the latter: torch compares a loss's shape with its gradient's
    added = {name: count for name, count in (engine - by_hand).items() if Path(name).name not in standard}
    assert added
    assert [name for name in added if not Path(name).is_relative_to(library)] == []


@pytest.mark.parametrize("name", LIBRARY_CALLS)
def test_a_step_of_a_trainer_makes_no_more_calls_than_the_loop_by_hand(name: str) -> None:
    """In each shape; what the library adds, it saves in clipping, in zeroing gradients and in backward."""
    scenario = BY_NAME[name]
    by_hand, trainer = calls_per_step(Bare, scenario), calls_per_step(Trainer, scenario, WITH_A_LOG)
    margin = ACCUMULATION_MARGIN if "accumulation" in scenario.settings else 0
    assert trainer <= by_hand + margin


@pytest.mark.parametrize(("name", "limit"), LIBRARY_CALLS.items())
def test_a_step_of_a_trainer_makes_a_fixed_number_of_calls_of_the_library(name: str, limit: float) -> None:
    calls = seen(CallsByFile, Trainer, BY_NAME[name], WITH_A_LOG)
    assert library_calls(calls) / (WITH_A_LOG[1] - WITH_A_LOG[0]) <= limit


@pytest.mark.parametrize(("name", "limit"), [("fit-ddp", 111), ("fit-callable-ddp", 115)])
def test_a_step_on_two_ranks_makes_a_fixed_number_of_calls_of_the_library(name: str, limit: float) -> None:
    def body() -> float:
        dist.init_process_group("gloo")
        return library_calls(seen(CallsByFile, Trainer, BY_NAME[name], FEW)) / (FEW[1] - FEW[0])

    assert max(run_world(body, timeout=120)) <= limit


def test_a_progress_bar_looks_at_the_clock_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step, and it draws a few times in so many: here twice, as the clock moves by a fixed time a look."""
    clock = itertools.count(0.0, 2**-8)  # seconds
    monkeypatch.setattr("trainer_lib.callbacks.progress_bar.time", SimpleNamespace(perf_counter=clock.__next__))
    with_bar = calls_per_step(Trainer, FITTING_WITH_BAR, WITH_A_LOG)
    assert next(clock) > 100 * 2**-8  # the bar looked at this clock
    without = calls_per_step(Trainer, FITTING, WITH_A_LOG)
    assert without < with_bar <= without + BAR_MARGIN


@pytest.mark.parametrize(
    ("scenario", "same_by_hand", "updates"), [(FITTING, UPDATING, 16), (FITTING_IN_WINDOWS, ACCUMULATING, 4)]
)
def test_a_step_of_a_trainer_asks_torch_for_loss_and_norm_and_no_more(
    scenario: Scenario, same_by_hand: Scenario, updates: int
) -> None:
    """On the host, where there is nothing to wait for: a loss before it is learned from and for the log."""
    by_hand, trainer = seen(Operations, Bare, same_by_hand), seen(Operations, Trainer, scenario)
    assert trainer - by_hand - READING == Counter({"aten._local_scalar_dense.default": 2 * 16 + updates})


def test_an_evaluation_looks_up_nothing_that_the_one_before_looked_up() -> None:
    """No signature, no name that is similar to a misspelt one, and not the fields of the arguments."""
    dataset = TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    arguments = TrainingArguments(use_cpu=True, progress_bar=False)
    trainer = trainer_lib.Trainer(nn.Linear(2, 2), arguments, loss_fn=nn.functional.cross_entropy)
    for _ in range(2):  # the first one sets attributes, whose names the next one looks up
        trainer.evaluate(dataset)
    meter = CallsByFile()
    with meter:
        trainer.evaluate(dataset)
    assert {"difflib.py", "inspect.py"}.isdisjoint(Path(name).name for name in meter.seen)
    assert sum(count for name, count in meter.seen.items() if Path(name).name == "dataclasses.py") < 60


def test_a_state_that_exists_is_returned_without_a_look_at_options() -> None:
    PartialState(cpu=True)
    meter = CallsByFile()
    with meter:
        PartialState()
    assert library_calls(meter.seen) == 2  # the constructor, and whether there is a state


def test_an_average_of_weights_makes_two_calls_a_weight() -> None:
    """Of the library, for the tensor behind a weight and its average."""

    def calls(layers: int, steps: int) -> int:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
        arguments = TrainingArguments(use_cpu=True, progress_bar=False, max_steps=steps, per_device_train_batch_size=2)
        dataset = TensorDataset(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
        loss_fn, meter = nn.functional.cross_entropy, CallsByFile()
        trainer = trainer_lib.Trainer(model, arguments, train_dataset=dataset, loss_fn=loss_fn, callbacks=[EMA()])
        with meter:
            trainer.fit()
        return sum(count for name, count in meter.seen.items() if Path(name).name in AVERAGING_FILES)

    a_step_of_many, a_step_of_few = calls(12, 4) - calls(12, 3), calls(2, 4) - calls(2, 3)
    assert a_step_of_many - a_step_of_few == 2 * 10


def test_the_generators_of_a_dataset_are_searched_once_for_an_evaluation() -> None:
    held = HeldGenerators({"dataset": [[{"label": index}] for index in range(100)]})

    held.by_path()  # what is remembered of classes
    search, evaluation = CallsByFile(), CallsByFile()
    with search:
        held.by_path()
    with evaluation, held.kept():
        pass
    once = search.seen[held_generators.__file__]
    assert once > 300
    assert evaluation.seen[held_generators.__file__] <= once + 2
