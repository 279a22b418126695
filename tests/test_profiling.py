"""Profiling: what is recorded, which traces are left, and what is said about options that cannot be meant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError
from trainer_lib.options.profiler_options import ProfileKwargs


def names_in(trace: Path) -> set[str]:
    """Read a trace back, and return the names of what happened."""
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()


def prepared(**arguments: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Linear(4, 4)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_block_is_recorded_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator, model, optimizer = prepared()
    with accelerator.profile() as profiler:
        step(accelerator, model, optimizer)
    assert {"aten::addmm", "aten::mm"} <= {event.key for event in profiler.key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_each_process_leaves_a_trace_of_its_steps(tmp_path: Path) -> None:
    def body() -> list[str]:
        options = ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path / "new" / "traces")
        accelerator, model, optimizer = prepared(kwargs_handlers=[options])
        with accelerator.profile():
            step(accelerator, model, optimizer)
        # When one rank leaves the block, all ranks have written their traces.
        return sorted(path.name for path in (tmp_path / "new" / "traces").iterdir())

    assert run_world(body, timeout=60) == [["profile_0.json", "profile_1.json"]] * 2
    for rank in (0, 1):
        names = names_in(tmp_path / "new" / "traces" / f"profile_{rank}.json")
        assert {"aten::addmm", "aten::mm", "Optimizer.step#SGD.step"} <= names


def test_the_traces_of_all_cycles_and_blocks_survive(tmp_path: Path) -> None:
    ends: list[int] = []

    def note(profiler: profile) -> None:
        ends.append(profiler.step_num)

    options = ProfileKwargs(
        activities=["CPU"],
        schedule_option={"skip_first": 1, "wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=note,
        output_trace_dir=str(tmp_path),
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with accelerator.profile() as profiler:
        for number in range(9):
            with torch.profiler.record_function(f"step {number}"):
                torch.ones(2).add(1)
            profiler.step()
    assert ends == [4, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_0_2.json"]
    recorded = [names_in(tmp_path / name) for name in ("profile_0.json", "profile_0_2.json")]
    assert [sorted(name for name in names if name.startswith("step ")) for names in recorded] == [
        ["step 3"],
        ["step 6"],
    ]
    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path)):
        torch.ones(2).neg()
    assert "aten::neg" in names_in(tmp_path / "profile_0_3.json")


def fail(profiler: Any = None) -> None:
    raise OSError("own fault")


def test_a_block_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    options = ProfileKwargs(output_trace_dir=tmp_path)
    with pytest.raises(OSError, match="own fault"), Accelerator(cpu=True).profile(options):
        fail(torch.ones(2).neg())
    assert "aten::neg" in names_in(tmp_path / "profile_0.json")


def test_an_error_at_the_end_of_a_cycle_waits_for_the_end_of_the_block(tmp_path: Path) -> None:
    """torch's profiler would end the process."""
    cycle = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    options = ProfileKwargs(schedule_option=cycle, on_trace_ready=fail, output_trace_dir=tmp_path)
    steps: list[int] = []

    def run() -> None:
        with Accelerator(cpu=True).profile(options) as profiler:
            for number in range(6):
                steps.append(number)
                profiler.step()

    with pytest.raises(OSError, match="own fault"):
        run()
    assert len(steps) == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ProfileKwargs(output_trace_dir=tmp_path / "file" / "traces")
    with pytest.raises(NotADirectoryError), Accelerator(cpu=True).profile(options):
        raise AssertionError("never runs")


def test_other_options_are_named() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"profile takes a ProfileKwargs \(got {'with_stack': True}"),
        Accelerator(cpu=True).profile({"with_stack": True}),  # type: ignore[arg-type]
    ):
        pass


def test_torch_gets_all_options() -> None:
    options = ProfileKwargs(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        with_flops=True,
        with_modules=True,
    )
    built: Any = options.build()
    assert built.activities == {ProfilerActivity.CPU}
    for name in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"):
        assert getattr(built, name) is True
        assert getattr(ProfileKwargs().build(), name) is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"activities": ["cuda"]}, "'cuda' cannot be recorded on this machine. Supported: cpu"),
        ({"activities": ["gpu"]}, "Unknown activity 'gpu'. Known: cpu, cuda"),
        ({"activities": "cpu"}, r"a list such as \['cpu'\]"),
        ({"activities": []}, "a list such as"),
        ({"schedule_option": {"wait": 1, "warm_up": 1, "active": 1}}, "'warm_up'.* Did you mean 'warmup'"),
        ({"schedule_option": {"wait": 1}}, "lacks warmup, active"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 0}}, r"schedule_option\['active'\] .* at least 1"),
        ({"schedule_option": {"wait": -1, "warmup": 1, "active": 1}}, r"schedule_option\['wait'\]"),
        ({"on_trace_ready": "print"}, "on_trace_ready must be a function"),
        ({"with_stack": "yes"}, "with_stack must be True or False"),
        ({"output_trace_dir": 3}, "the path of a folder, got 3"),
        ({"output_trace_dir": ""}, "the path of a folder, got ''"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(arguments: dict[str, Any], words: str) -> None:
    if arguments == {"activities": ["cuda"]} and torch.cuda.is_available():
        pytest.skip("this machine can")
    with pytest.raises(ConfigurationError, match=words):
        ProfileKwargs(**arguments).build()
