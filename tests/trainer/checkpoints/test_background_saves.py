"""Checkpoints that are written while training goes on: the run is the same, and nothing is told before it is there."""

import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainings import Dies
from tests.trainer.checkpoints.test_resume import run
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import CheckpointError
from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.events import Callback, Modifier, Run

import_module("torch._dynamo")  # here, so that not each forked process imports it


class Heard(Callback):
    """Keeps what is told of checkpoints, and whether they were there."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []  # what, of which step, at which step
        self.absent: list[Any] = []

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self.told.append(("begin", int(folder.name[-8:]), run.state.step))

    def on_save_end(self, run: Run, folder: Path) -> None:
        self.told.append(("end", int(folder.name[-8:]), run.state.step))
        self.absent += [path for path in (folder,) if not is_committed(path)]

    def on_step_end(self, run: Run) -> None:
        self.absent += [one for one in run.state.checkpoints if not is_committed(Path(one["path"]))]


class Gate(Modifier):
    """Lets the thread write only from a certain step on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens_at: int) -> None:
        self.is_open, self.opens_at = threading.Event(), opens_at
        write = CheckpointWriter.write

        def wait(saving: CheckpointWriter, *arguments: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert self.is_open.wait(30)
            return write(saving, *arguments)

        monkeypatch.setattr(CheckpointWriter, "write", wait)

    def on_step_begin(self, run: Run) -> None:
        if run.state.step + 1 == self.opens_at:
            self.is_open.set()
            run.accelerator.wait_for_save()  # so that the step's end finds it written


def test_steps_go_on_and_the_end_of_the_first_one_after_the_commit_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    args = arguments(output_dir=tmp_path, max_steps=9, save_every=2, keep_last=1, save_in_background=True)
    result = trainer(args, callbacks=[heard, Gate(monkeypatch, opens_at=4)]).fit()
    assert heard.told[:4] == [("begin", 2, 2), ("end", 2, 4), ("begin", 4, 4), heard.told[3]]
    assert [step for what, step, _ in heard.told if what == "end"] == [2, 4, 6, 8, 9]
    assert heard.absent == []
    # What goes on from a checkpoint knows of it, and of those before it.
    assert [one["step"] for one in result.state.checkpoints] == [9]
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-00000009"]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_synchronous_save_tells_at_once(tmp_path: Path, in_background: bool) -> None:
    heard = Heard()
    args = arguments(output_dir=tmp_path, max_steps=4, save_every=2, save_in_background=in_background)
    trainer(args, callbacks=[heard]).fit()
    assert heard.absent == []
    ends = [(step, at) for what, step, at in heard.told if what == "end"]
    assert [step for step, _ in ends] == [2, 4]
    if not in_background:
        assert ends == [(2, 2), (4, 4)]


def test_the_run_and_its_resumption_are_the_same_either_way(tmp_path: Path) -> None:
    whole = run(tmp_path / "now", {"save_in_background": False}, points())
    assert run(tmp_path / "behind", {"save_in_background": True}, points()) == whole
    assert run(tmp_path / "parts", {"save_in_background": True}, points(), dies_at=7) is None
    assert run(tmp_path / "parts", {"save_in_background": True}, points(), resume="auto") == whole


def test_an_exception_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointWriter.write

    def slowly(saving: CheckpointWriter, *arguments: Any) -> None:
        threading.Event().wait(0.2)
        return write(saving, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write", slowly)
    args = arguments(output_dir=tmp_path, save_every=2, save_in_background=True)
    one = trainer(args, callbacks=[Dies(3)])
    with pytest.raises(InterruptedError):
        one.fit()
    assert [one["step"] for one in one.state.checkpoints] == [2]
    assert is_committed(Path(one.state.checkpoints[0]["path"]))


def test_a_failure_of_the_thread_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(saving: CheckpointWriter, *arguments: Any) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    heard = Heard()
    args = arguments(output_dir=tmp_path, max_steps=3, save_every=3, save_in_background=True)
    one = trainer(args, callbacks=[heard])
    with pytest.raises(CheckpointError, match=r"checkpoint-00000003 could not be saved in the background\. no such"):
        one.fit()
    assert [what for what, *_ in heard.told] == ["begin"]
    assert one.state.checkpoints == []


class AllTogether(Modifier):
    """Sends a message at the end of each save: in vain, if the processes were not at the same place."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_end(self, run: Run, folder: Path) -> None:
        everyone = run.accelerator.group.all_gather_objects(run.state.step)
        assert everyone == [run.state.step] * len(everyone)
        self.steps.append(int(folder.name[-8:]))


def test_all_processes_hear_of_a_checkpoint_at_the_same_step(tmp_path: Path) -> None:
    def body() -> list[int]:
        together = AllTogether()
        args = arguments(output_dir=tmp_path, max_steps=24, save_every=3, save_in_background=True)
        trainer(args, callbacks=[together], train_dataset=points(64)).fit()
        return together.steps

    assert run_world(body, timeout=60) == [[3, 6, 9, 12, 15, 18, 21, 24]] * 2
