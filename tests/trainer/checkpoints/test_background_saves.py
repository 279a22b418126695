"""Background saves: they do not change the run, and `on_save_end` fires after the checkpoint is complete."""

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

import_module("torch._dynamo")  # imported once here, not in each forked process


class SaveEvents(Callback):
    """Records the save events, and the checkpoints that did not exist at their event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []  # the event, the checkpoint's step, the run's step
        self.missing: list[Any] = []

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self.events.append(("begin", int(folder.name[-8:]), run.state.step))

    def on_save_end(self, run: Run, folder: Path) -> None:
        self.events.append(("end", int(folder.name[-8:]), run.state.step))
        self.missing += [path for path in (folder,) if not is_committed(path)]

    def on_step_end(self, run: Run) -> None:
        self.missing += [
            checkpoint for checkpoint in run.state.checkpoints if not is_committed(Path(checkpoint["path"]))
        ]


class Gate(Modifier):
    """Blocks the writing thread until a given step."""

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


def test_training_continues_during_a_save_and_the_first_step_after_the_commit_fires_on_save_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_events = SaveEvents()
    args = arguments(output_dir=tmp_path, max_steps=9, save_every=2, keep_last=1, save_in_background=True)
    result = trainer(args, callbacks=[save_events, Gate(monkeypatch, opens_at=4)]).fit()
    assert save_events.events[:4] == [("begin", 2, 2), ("end", 2, 4), ("begin", 4, 4), save_events.events[3]]
    assert [step for event, step, _ in save_events.events if event == "end"] == [2, 4, 6, 8, 9]
    assert save_events.missing == []
    # A run that resumes from a checkpoint lists this one and the earlier ones.
    assert [checkpoint["step"] for checkpoint in result.state.checkpoints] == [9]
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-00000009"]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_synchronous_save_fires_on_save_end_at_once(tmp_path: Path, in_background: bool) -> None:
    save_events = SaveEvents()
    args = arguments(output_dir=tmp_path, max_steps=4, save_every=2, save_in_background=in_background)
    trainer(args, callbacks=[save_events]).fit()
    assert save_events.missing == []
    ends = [(step, at) for event, step, at in save_events.events if event == "end"]
    assert [step for step, _ in ends] == [2, 4]
    if not in_background:
        assert ends == [(2, 2), (4, 4)]


def test_a_run_and_its_resume_are_the_same_with_background_and_synchronous_saves(tmp_path: Path) -> None:
    whole = run(tmp_path / "now", {"save_in_background": False}, points())
    assert run(tmp_path / "behind", {"save_in_background": True}, points()) == whole
    assert run(tmp_path / "parts", {"save_in_background": True}, points(), dies_at=7) is None
    assert run(tmp_path / "parts", {"save_in_background": True}, points(), resume="auto") == whole


class Slow(Callback):
    """Takes some time in each step."""

    def on_step_end(self, run: Run) -> None:
        threading.Event().wait(0.02)


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each checkpoint take a tenth of a second longer to write."""
    write = CheckpointWriter.write

    def write_slowly(saving: CheckpointWriter, *arguments: Any) -> None:
        threading.Event().wait(0.1)
        write(saving, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write", write_slowly)


@pytest.mark.usefixtures("slow_writes")
def test_training_while_a_checkpoint_is_written_counts_in_the_speed(tmp_path: Path) -> None:
    args = arguments(output_dir=tmp_path, max_steps=8, save_every=3, log_every=1, save_in_background=True)
    speeds = [entry["steps_per_second"] for entry in trainer(args, callbacks=[Slow()]).fit().state.history]
    assert len(speeds) == 8
    assert max(speeds) < 1 / 0.02


@pytest.mark.usefixtures("slow_writes")
def test_the_time_that_training_waits_for_checkpoints_does_not_count_in_the_speed(tmp_path: Path) -> None:
    args = arguments(output_dir=tmp_path, max_steps=8, save_every=3, log_every=1, save_in_background=False)
    waiting = trainer(args)
    waiting.fit()
    assert waiting.run.saving_seconds > 3 * 0.1  # at steps 3, 6 and 8


def test_an_exception_waits_for_the_background_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointWriter.write

    def write_slowly(saving: CheckpointWriter, *arguments: Any) -> None:
        threading.Event().wait(0.2)
        return write(saving, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write", write_slowly)
    args = arguments(output_dir=tmp_path, save_every=2, save_in_background=True)
    model_trainer = trainer(args, callbacks=[Dies(3)])
    with pytest.raises(InterruptedError):
        model_trainer.fit()
    assert [checkpoint["step"] for checkpoint in model_trainer.state.checkpoints] == [2]
    assert is_committed(Path(model_trainer.state.checkpoints[0]["path"]))


def test_an_error_in_the_writing_thread_is_raised_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(saving: CheckpointWriter, *arguments: Any) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    save_events = SaveEvents()
    args = arguments(output_dir=tmp_path, max_steps=3, save_every=3, save_in_background=True)
    model_trainer = trainer(args, callbacks=[save_events])
    with pytest.raises(CheckpointError, match=r"checkpoint-00000003 could not be saved in the background\. no such"):
        model_trainer.fit()
    assert [event for event, *_ in save_events.events] == ["begin"]
    assert model_trainer.state.checkpoints == []


class GathersSteps(Modifier):
    """Gathers the ranks' steps at the end of each save, which fails if they differ."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_end(self, run: Run, folder: Path) -> None:
        steps = run.accelerator.group.all_gather_objects(run.state.step)
        assert steps == [run.state.step] * len(steps)
        self.steps.append(int(folder.name[-8:]))


def test_all_ranks_fire_on_save_end_at_the_same_step(tmp_path: Path) -> None:
    def body() -> list[int]:
        gathers = GathersSteps()
        args = arguments(output_dir=tmp_path, max_steps=24, save_every=3, save_in_background=True)
        trainer(args, callbacks=[gathers], train_dataset=points(64)).fit()
        return gathers.steps

    assert run_world(body, timeout=60) == [[3, 6, 9, 12, 15, 18, 21, 24]] * 2
