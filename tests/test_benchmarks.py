"""The benchmarks compare like with like, and tell what they saw. No test looks at a time."""

import dataclasses
import functools
import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

import trainer_lib.callbacks
from benchmarks import callbacks, fresh, plot, report, rounds
from benchmarks.contestants.bare import Bare, BareAgain
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer import Trainer
from benchmarks.contestants.trainer_lib import TrainerLib
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.fresh import compare_fresh, tell_end
from benchmarks.isolation import isolated
from benchmarks.meters import Meter
from benchmarks.processes import compare_on_processes
from benchmarks.rounds import compare
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.task import Task
from tests.worlds import run_world


class Missing(Bare):
    name = "missing"
    package = "a_package_that_is_not_there"


class Lazy(Bare):
    name = "lazy"

    def update(self, task: Task, meter: Meter) -> float:
        with meter:
            pass
        return 0.0


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep collections of garbage, of which there is one before each run, from going through all that is there."""
    gc.freeze()
    with monkeypatch.context() as patches:
        patches.setattr(gc, "unfreeze", lambda: None)  # which a comparison calls before it counts
        yield
    gc.unfreeze()


def shorten(patches: pytest.MonkeyPatch) -> None:
    """Make the runs short that warm up and that count calls."""
    patches.setattr(rounds, "_SHORT", 4)
    patches.setattr(rounds, "_LONG", 8)


def scenario_of(name: str) -> Scenario:
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    return scenario


# One scenario of each kind of loop; the others run with `make test-all`.
DAILY = {"accumulation", "shuffled", "fit", "fit-callable", "fit-folder"}


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=scenario.name, marks=[] if scenario.name in DAILY else pytest.mark.slow)
        for scenario in SCENARIOS
        if scenario.world_size == 1 and not scenario.fresh
    ],
)
def test_contestants_do_the_same_work_on_one_process(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    ours = [TrainerLib, Trainer]  # of which only the one takes part that has this kind of loop
    by_hand, again, engine, missing = compare(scenario, [Bare, BareAgain, *ours, Missing], rounds=2, steps=4).rows
    assert len(engine.samples) == len(by_hand.samples) == 2
    assert by_hand.cpu_ratio == (1.0, 1.0, 1.0)
    assert by_hand.calls == again.calls
    assert (missing.note, missing.samples) == ("not installed", ())


ON_TWO_PROCESSES: dict[str, type[Contestant]] = {"weighted": TrainerLib, "fit-ddp": Trainer, "evaluation": Trainer}


@pytest.mark.slow
def test_contestants_do_the_same_work_on_two_processes() -> None:
    def body() -> dict[str, list[int]]:
        dist.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as patches:
            shorten(patches)
            patches.setattr(gc, "unfreeze", lambda: None)  # the process runs other tests next, with the frozen objects
            return {name: samples_of(name, engine) for name, engine in ON_TWO_PROCESSES.items()}

    def samples_of(name: str, engine: type[Contestant]) -> list[int]:
        scenario = dataclasses.replace(scenario_of(name), steps=None)
        return [len(row.samples) for row in compare(scenario, [Bare, engine], rounds=2, steps=4).rows]

    assert run_world(body, timeout=60) == [{name: [2, 2] for name in ON_TWO_PROCESSES}] * 2


@pytest.mark.slow
@pytest.mark.launch
def test_processes_of_a_comparison_are_started() -> None:
    rows = compare_on_processes(scenario_of("evaluation"), [Bare, Trainer], rounds=1, steps=8).rows
    assert [len(row.samples) for row in rows] == [1, 1]
    # Python starts it for spawned processes, and keeps it. It would wait for all processes that were forked meanwhile.
    os.kill(_resource_tracker._pid, signal.SIGKILL)  # type: ignore[attr-defined]
    _resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.launch
def test_a_fresh_process_tells_its_time_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fresh, "measure_fresh", functools.cache(fresh.measure_fresh)
    )  # one process is enough to look at
    ours, missing = compare_fresh(scenario_of("first-step"), [Trainer, Missing, TrainerLib], rounds=1).rows
    assert ours.wall.median > 0.01
    assert ours.memory > 50 * 2**20 or not Path("/proc/self/status").exists()
    assert missing.note == "not installed"


@pytest.mark.usefixtures("frozen")
def test_the_end_of_a_loop_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tell_end("Trainer", "first-step", 1, time.perf_counter() - 10, time.process_time() - 10)
    cpu, wall, memory = (float(number) for number in capsys.readouterr().out.split())
    assert min(cpu, wall) > 10
    assert memory > 50 * 2**20 or not Path("/proc/self/status").exists()


@pytest.mark.usefixtures("frozen")
def test_contestant_that_does_less_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"lazy came to 0\.0 in 'step'.* do not do the same work"):
        compare(SCENARIOS[0], [Bare, Lazy], rounds=1, steps=8)


def test_a_run_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    with isolated():
        os.environ["A_VARIABLE_OF_A_CONTESTANT"] = "1"
    assert dict(os.environ) == before


@pytest.fixture
def comparison() -> Comparison:
    """Return what a run could have measured."""
    by_hand = [Sample(cpu=400e-6, wall=500e-6), Sample(cpu=500e-6, wall=500e-6), Sample(cpu=400e-6, wall=500e-6)]
    engine = [Sample(cpu=420e-6, wall=600e-6), Sample(cpu=520e-6, wall=600e-6), Sample(cpu=440e-6, wall=700e-6)]
    rows = [
        Row(contestant="by hand", samples=by_hand, baseline=by_hand, calls=490.0),
        Row(contestant="trainer_lib", samples=engine, baseline=by_hand, calls=528.4, target="CPU 1.08"),
        Row(contestant="Accelerate", baseline=by_hand, note="not installed"),
    ]
    return Comparison(name="step", title="Steps <each>", rows=rows)


def test_figures_are_medians_of_the_rounds(comparison: Comparison) -> None:
    engine = comparison.rows[1]
    assert engine.cpu == (440e-6, 420e-6, 520e-6)
    assert engine.cpu_ratio == pytest.approx((1.05, 1.04, 1.10))
    assert engine.wall_ratio == pytest.approx((1.2, 1.2, 1.4))


def test_tables_show_every_contestant(comparison: Comparison) -> None:
    for text in (report.table([comparison]), report.markdown([comparison])):
        engine = next(line for line in text.splitlines() if "trainer_lib" in line)
        assert "1.050" in engine
        assert "528" in engine
        assert "CPU 1.08" in engine
        assert any("Accelerate" in line and "not installed" in line for line in text.splitlines())


def test_columns_without_anything_in_them_are_left_out(comparison: Comparison) -> None:
    assert "memory" not in report.markdown([comparison])
    row = Row(contestant="by hand", samples=[Sample(1.0, 2.0, memory=3 * 2**20)])
    (head, _, line) = report.markdown([Comparison(name="one", title="One", rows=[row])]).splitlines()[2:]
    assert head == "|  | CPU time | time | memory | target |"
    assert line == "| by hand | 1.00 s | 2.00 s | 3 MB |  |"


def test_picture_is_a_drawing_with_a_bar_for_each_that_ran(comparison: Comparison) -> None:
    drawing = ElementTree.fromstring(plot.svg([comparison]))
    assert [text.text for text in drawing.iter() if text.text in ("trainer_lib", "Accelerate")] == ["trainer_lib"]


def test_json_holds_every_run(comparison: Comparison, tmp_path: Path) -> None:
    report.write_json(tmp_path / "runs.json", "a machine", {"rounds": 3}, [comparison])
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert runs["rounds"] == 3
    assert runs["scenarios"]["step"]["trainer_lib"]["cpu"] == [420e-6, 520e-6, 440e-6]
    assert runs["scenarios"]["step"]["Accelerate"] == {"note": "not installed"}
    settings, (again,) = report.read_json(tmp_path / "runs.json", {"step": "Steps <each>"})
    assert settings == {"machine": "a machine", "rounds": 3}
    assert report.markdown([again]) == report.markdown([comparison])


def test_a_peer_that_is_faster_is_named(comparison: Comparison) -> None:
    slower, faster = ([Sample(sample.cpu * by, 1e-3) for sample in comparison.rows[1].samples] for by in (1.2, 0.95))
    by_hand, ours, _ = comparison.rows
    peers = [Row(contestant="A", samples=slower), Row(contestant="B", samples=faster)]
    assert report.ahead(Comparison(name="step", title="Steps", rows=[by_hand, ours, *peers])) == [
        "B (0.95 of its time)"
    ]


def test_each_callback_is_measured_or_it_is_told_why_not() -> None:
    measured = {case.name.split()[0] for case in callbacks.cases()}
    left_out = {name for names in callbacks.LEFT_OUT.values() for name in names.split()}
    assert measured | left_out == set(trainer_lib.callbacks.__all__)
    assert not measured & left_out


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", ["EMA as torch's AveragedModel", "NEFTune", "Throughput"])
def test_callbacks_are_measured_beside_the_run_without_them(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in callbacks.cases() if case.name == name)
    pairs = callbacks.measured(case, rounds=1, steps=4, folder=tmp_path)
    assert all(time > 0 for having, none in pairs for time in (*having, *none))


@pytest.mark.usefixtures("frozen")
def test_what_callbacks_add_to_a_step_is_counted(tmp_path: Path) -> None:
    (case,) = (case for case in callbacks.cases() if case.name == "LambdaCallback")
    assert callbacks.more_calls(case, tmp_path, short=8, long=24) == 2  # the function, and its event


def test_figures_of_callbacks_are_those_of_pairs() -> None:
    having, none = callbacks.Sample(cpu=3e-4, wall=4e-4), callbacks.Sample(cpu=2e-4, wall=4e-4)
    figures = callbacks.figures_line("one", [(having, none), (having, having), (having, none)], 2.0)
    assert "+2.0 calls; cpu 1.500 (1.000 to 1.500, of the fastest 1.500), +100.0 µs a step; wall 1.000 (1.0" in figures
