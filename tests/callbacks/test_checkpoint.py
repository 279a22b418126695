"""Tests of Checkpoint: when it saves, and what it deletes."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.loops import go_through, running
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import Checkpoint
from trainer_lib.checkpointing.format.manifest import Manifest, sealed
from trainer_lib.events import Best, Callback, Dispatcher, Run
from trainer_lib.events.requests import Control
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.process_group import LoneProcess


@dataclass
class Arguments:
    greater_is_better: bool | None = None


class AskedAt(Callback):
    """Notes the steps after which a checkpoint is asked for, and takes the request."""

    order = 1000

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, run: Run) -> None:
        run.control.sync_across_ranks(LoneProcess())
        if run.control.take("save"):
            self.steps.append(run.state.step)

    def on_epoch_end(self, run: Run) -> None:
        self.on_step_end(run)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.on_step_end(run)


class Folder:
    """Saves checkpoints as a trainer does: entered first, then written, then told."""

    def __init__(self, path: Path, checkpoint: Checkpoint, run: Run | None = None) -> None:
        self.path, self.run = path, run or running()
        self.events = Dispatcher([checkpoint])
        self.is_written = self.run.is_main_process
        self.of: str | None = None  # the run that manifests tell of

    def save(self, step: int, **metrics: float) -> None:
        self.run.state.step, target = step, self.path / f"checkpoint-{step}"
        state = self.run.state
        position = {"epoch": state.epochs, "samples": state.samples, "seconds": state.seconds}
        state.checkpoints.append({"path": str(target), "step": step, "metrics": metrics, **position})
        if self.is_written:
            target.mkdir(parents=True)
            (target / "manifest.json").write_bytes(sealed(Manifest(world_size=1, run_id=self.of).content()))
        self.events.fire("on_save_end", self.run, target)

    def entered(self) -> list[int]:
        return [entry["step"] for entry in self.run.state.checkpoints]

    def on_disk(self) -> list[int]:
        return sorted(int(path.name.removeprefix("checkpoint-")) for path in self.path.iterdir())


# -- asking --------------------------------------------------------------------------------------------------------


def test_without_an_interval_a_step_costs_nothing() -> None:
    events = Dispatcher([Checkpoint()])
    assert not events.listens("on_step_end")
    assert not events.listens("on_epoch_end")


@pytest.mark.parametrize(
    ("every", "expected"), [("3 steps", [3, 6, 9]), ("1 epoch", [5, 10]), ("16 samples", [4, 8]), (4, [4, 8])]
)
def test_an_interval_of_its_own_asks_for_saves(every: Any, expected: list[int]) -> None:
    asked = AskedAt()
    go_through([Checkpoint(every), asked], 11, running(steps_per_epoch=5))
    assert asked.steps == expected


def test_an_interval_continues_after_a_resume() -> None:
    asked = AskedAt()
    go_through([Checkpoint("4 steps"), asked], 9, running(step=6))
    assert asked.steps == [8]


def test_step_intervals_are_agreed_and_time_intervals_follow_rank_0() -> None:
    def body() -> tuple[bool, list[float], bool, list[float]]:
        accelerator = Accelerator(cpu=True)
        counted, timed = running(), running()
        counted.accelerator = timed.accelerator = accelerator
        go_through([Checkpoint("2 steps")], 2, counted)
        go_through([Checkpoint("0.000001 seconds")], 2, timed)
        return (
            counted.control.is_due("save"),
            counted.control.to_floats(),
            timed.control.save,
            timed.control.to_floats(),
        )

    asked = Control()
    asked.save = True
    nothing, save = Control().to_floats(), asked.to_floats()
    assert run_world(body, timeout=60) == [(True, nothing, True, save), (True, nothing, False, nothing)]


def test_a_new_best_is_saved_at_once() -> None:
    for keep_best, expected in ((1, True), (0, False)):
        run = running()
        Dispatcher([Checkpoint(keep_best=keep_best)]).fire("on_best", run, "eval_loss", 0.5)
        assert run.control.save is expected


def test_a_metric_of_its_own_asks_by_itself() -> None:
    asked, checkpoint = AskedAt(), Checkpoint(metric="eval_f1")
    values = {1: 0.5, 2: 0.4, 3: float("nan"), 4: 0.6, 5: 0.6}
    evaluations = {step: {"eval_f1": value, "eval_loss": 1.0} for step, value in values.items()}
    go_through([checkpoint, asked], 5, evaluations=evaluations)
    assert asked.steps == [1, 4]
    run = running()
    Dispatcher([checkpoint]).fire("on_best", run, "eval_loss", 0.5)  # the trainer's own is another matter
    assert not run.control.save
    again = Checkpoint(metric="eval_f1")
    Dispatcher([again]).load_state_dict(Dispatcher([checkpoint]).state_dict())
    again.on_evaluate_end(run, {"eval_f1": 0.6})
    assert not run.control.save
    again.on_evaluate_end(Run(), {"test_f1": 0.9})  # outside training
    again.on_evaluate_end(run, {"eval_f1": 0.7})
    assert run.control.save


def test_a_new_run_and_a_rewind_begin_without_the_best_value_of_before() -> None:
    asked, checkpoint = AskedAt(), Checkpoint(metric="eval_f1")
    before = Dispatcher([checkpoint]).state_dict()  # of a checkpoint before the first evaluation
    go_through([checkpoint, asked], 2, evaluations={1: {"eval_f1": 0.9}})
    go_through([checkpoint, asked], 2, evaluations={2: {"eval_f1": 0.5}})  # another run with the same object
    assert asked.steps == [1, 2]
    run = running()
    Dispatcher([checkpoint]).load_state_dict(before)
    checkpoint.on_evaluate_end(run, {"eval_f1": 0.4})
    assert run.control.save


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"Checkpoint uses the metric 'eval_f2'.*It has: eval_f1"):
        Checkpoint(metric="eval_f2", greater_is_better=True).on_evaluate_end(running(), {"eval_f1": 1.0})


# -- keeping -------------------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=2))
    for step in (1, 2, 3, 4):
        folder.save(step)
        assert folder.entered() == folder.on_disk() == list(range(max(1, step - 1), step + 1))


def test_all_are_kept_on_request(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=None))
    for step in range(1, 6):
        folder.save(step)
    assert folder.entered() == folder.on_disk() == [1, 2, 3, 4, 5]


def test_the_best_are_kept_too(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1, keep_best=2, metric="eval_f1"))
    for step, value in enumerate((0.1, 0.8, 0.7, 0.8, float("nan"), 0.2), start=1):
        folder.save(step, eval_f1=value)
    folder.save(7)
    assert folder.entered() == folder.on_disk() == [2, 4, 7]


def test_the_best_goes_by_the_metric_of_the_trainer(tmp_path: Path) -> None:
    run = running(best=Best("eval_harmony", 0.5, 2))
    run.args = Arguments(greater_is_better=True)
    folder = Folder(tmp_path, Checkpoint(keep_last=1, keep_best=2), run)
    for step, value in enumerate((0.1, 0.5, 0.3, 0.2), start=1):
        folder.save(step, eval_harmony=value)
    assert folder.on_disk() == [2, 3, 4]
    run = running(best=Best("eval_loss", 0.1, 1))
    folder = Folder(tmp_path / "other", Checkpoint(keep_last=1, keep_best=1), run)
    for step, value in enumerate((0.1, 0.5, 0.3, 0.2), start=1):
        folder.save(step, eval_loss=value)
    assert folder.on_disk() == [1, 4]


def test_the_best_of_all_is_never_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1, keep_best=0))
    for step, value in enumerate((0.4, 0.1, 0.3, 0.2), start=1):
        if step == 2:
            folder.run.state.best = Best("eval_loss", 0.1, 2)
        folder.save(step, eval_loss=value)
    assert folder.on_disk() == [2, 4]
    # Nor that of the trainer, where another metric is gone by.
    run = running(best=Best("eval_loss", 0.1, 1))
    folder = Folder(tmp_path / "other", Checkpoint(keep_last=1, metric="eval_f1"), run)
    for step, value in enumerate((0.1, 0.3, 0.2), start=1):
        folder.save(step, eval_f1=value)
    assert folder.on_disk() == [1, 2, 3]


def test_without_evaluations_the_last_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1, keep_best=3))
    folder.save(1, eval_loss=0.5)
    folder.save(2)
    assert folder.on_disk() == [2]


def test_the_rest_of_a_killed_deletion_is_deleted_next_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1))
    folder.save(1)
    # The run is killed while it deletes 1, and resumes from 2, which lists 1.
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-1.deleted")
    folder.save(2)
    assert folder.on_disk() == [2]


def test_a_deletion_moves_the_checkpoint_out_of_the_way_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, removed = Folder(tmp_path, Checkpoint(keep_last=1)), list[str]()
    rmtree = shutil.rmtree

    def note(path: Path, **kwargs: Any) -> None:
        removed.append(path.name)
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", note)
    folder.save(1)
    folder.save(2)
    assert removed == ["checkpoint-1.deleted"]


def test_a_failed_deletion_warns_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1))
    folder.save(1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainer_lib.checkpointing.save.retention.delete_state", refuse)
    with caplog.at_level(logging.WARNING):
        folder.save(2)
    assert "checkpoint-1 could not be deleted: [Errno 13] Permission denied" in caplog.text
    assert folder.entered() == [2]
    assert folder.on_disk() == [1, 2]
    assert list(folder.events)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("5 steps", [6, 10, 16, 18]),
        ("2 epochs", [8, 16, 18]),  # of 4 steps each
        ("48 samples", [6, 12, 18]),  # 8 a step
        ("1 minute", [6, 12, 18]),  # 10 seconds a step
        (100, [18]),
    ],
)
def test_at_an_interval_the_first_at_or_after_each_multiple_stays(
    tmp_path: Path, every: Any, expected: list[int]
) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1, keep_every=every), running(steps_per_epoch=4))
    for step in range(2, 20, 2):
        state = folder.run.state
        state.epoch, state.steps_in_epoch, state.samples, state.seconds = step // 4, step % 4, 8 * step, 10.0 * step
        folder.save(step)
    assert folder.entered() == folder.on_disk() == expected


def test_only_complete_checkpoints_of_this_run_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path, Checkpoint(keep_last=1), running(run_id="own"))
    folder.of = "another"
    folder.save(1)
    folder.of = "own"
    folder.save(2)
    folder.save(3)
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    assert folder.on_disk() == [1, 3]
    folder.save(4)
    assert (folder.entered(), folder.on_disk()) == ([4], [1, 3, 4])
    folder.events = Dispatcher()
    folder.save(5)
    (tmp_path / "checkpoint-5" / "manifest.json").write_text("{")
    Dispatcher([Checkpoint(keep_last=1)]).fire("on_save_end", folder.run, tmp_path / "checkpoint-5")
    assert folder.on_disk() == [1, 3, 4, 5]  # 4 is the last that is whole
    assert "No older checkpoint is deleted, because the newest one is damaged" in caplog.text


def test_files_in_other_folders_are_not_deleted(tmp_path: Path) -> None:
    original = Folder(tmp_path / "original", Checkpoint(keep_last=2))
    original.save(1)
    copy = Folder(tmp_path / "copy", Checkpoint(keep_last=1))
    copy.run.state.checkpoints += original.run.state.checkpoints
    copy.save(2)
    assert copy.entered() == [2]
    assert original.on_disk() == [1]


def test_rank_0_deletes_and_all_ranks_keep_the_same_list(tmp_path: Path) -> None:
    def body() -> tuple[list[int], bool]:
        run = running()
        run.accelerator = accelerator = Accelerator(cpu=True)
        folder = Folder(tmp_path / str(accelerator.process_index), Checkpoint(keep_last=1), run)
        folder.is_written = True
        for step in (1, 2):
            folder.save(step)
        return folder.entered(), folder.on_disk() == [2]

    assert run_world(body, timeout=60) == [([2], True), ([2], False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"keep_last": 0},
            r"keep_last must be a number of checkpoints \(got 0\)\. Give 1 or more, or None to keep all",
        ),
        ({"keep_last": 1.5}, r"keep_last must be a number of checkpoints \(got 1.5\)"),
        ({"keep_last": True}, r"keep_last must be a number of checkpoints \(got True\)"),
        ({"keep_best": -1}, r"keep_best must be a number of checkpoints \(got -1\)\. Give 0 or more"),
        ({"keep_best": None}, r"keep_best must be a number of checkpoints \(got None\)"),
        ({"every": "3 stps"}, "every='3 stps': unknown unit"),
        ({"keep_every": "3 stps"}, "keep_every='3 stps': unknown unit"),
        ({"keep_every": 3, "keep_last": None}, "keep_every=3 has no effect: keep_last=None keeps all"),
        ({"metric": "eval_harmony"}, "cannot be inferred from the name of the metric 'eval_harmony'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 10}, r"keep_last=10 has no effect, because callbacks has a Checkpoint, whose keep_last is 2\."),
        (
            {"keep_every": "9 steps"},
            r"keep_every='9 steps' has no effect.*keep_every is None.* keep_every='9 steps', or",
        ),
    ],
)
def test_arguments_that_a_given_checkpoint_would_overrule_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = Checkpoint(keep_last=2)
    with pytest.raises(ConfigurationError, match=words):
        trainer(arguments(output_dir=tmp_path, **options), callbacks=[given])
    trainer(arguments(output_dir=tmp_path, keep_last=2), callbacks=[given])


def test_two_checkpoints_would_delete_each_others(tmp_path: Path) -> None:
    class Ours(Checkpoint):
        pass

    trainer(arguments(output_dir=tmp_path), callbacks=[Ours(keep_last=2)])  # it replaces the default
    with pytest.raises(ConfigurationError, match="only one can decide which checkpoints are kept"):
        trainer(arguments(output_dir=tmp_path), callbacks=[Checkpoint(metric="eval_f1"), Ours(keep_last=2)])
