"""Which run `resume="auto"` resumes, the warning about other runs, and a damaged run.json."""

import contextlib
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.faults.injuries import killed_after
from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib.checkpointing.format.listing import checkpoints_by_run
from trainer_lib.commands.main import main
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.runs import find_runs
from trainer_lib.trainer.defaults import run_fingerprint


class FirstStep(Callback):
    """Records the step at which training begins."""

    step = -1

    def on_fit_begin(self, run: Run) -> None:
        self.step = run.state.step


def fit(folder: Path, resume: str = "never", dies_at: int | None = None, **options: Any) -> int:
    """Train for ten steps, and return the step at which training began."""
    first_step = FirstStep()
    callbacks = [first_step] if dies_at is None else [first_step, Dies(dies_at)]
    model_trainer = trainer(arguments(output_dir=folder, save_every=2, resume=resume), callbacks=callbacks, **options)
    with contextlib.suppress(InterruptedError):
        model_trainer.fit()
    return first_step.step


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Return the folder of a run that died at step 7."""
    fit(tmp_path / "runs", dies_at=7)
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


class KilledInSave(Callback):
    """Kills the process in the middle of a save."""

    def on_save_begin(self, run: Run, folder: Path) -> None:
        killed_after(6)


def test_a_new_run_deletes_what_a_kill_left_of_the_first_save_of_an_older_one(tmp_path: Path) -> None:
    def dies() -> None:
        trainer(arguments(output_dir=tmp_path, save_every=2, resume="auto"), callbacks=[KilledInSave()]).fit()

    with pytest.raises(ProcessFailedError, match="SIGKILL"):
        run_forked(dies, num_processes=1, timeout=60)
    (partial,) = tmp_path.glob("*/checkpoints/checkpoint-00000002.partial")
    assert list(partial.iterdir())
    lease = next(tmp_path.glob("*/lease-*.json"))
    content = lease.read_text()
    lease.write_text(json.dumps({**json.loads(content), "host": "another"}))  # where the program may be alive
    assert fit(tmp_path, resume="auto") == 0
    assert partial.exists()
    (newer,) = {*tmp_path.iterdir()} - {partial.parents[1]}
    shutil.rmtree(newer)
    lease.write_text(content)
    assert fit(tmp_path, resume="auto", train_dataset=points(41)) == 0
    assert partial.exists()
    assert fit(tmp_path, resume="auto") == 0
    assert not partial.exists()
    assert partial.parent.is_dir()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"train_dataset": points(41)}, "its training data is tuple of 40 samples, and this is tuple of 41 samples"),
        (
            {"model": nn.Sequential(nn.Linear(6, 2))},
            "its model is Sequential of 74 parameters, and this is Sequential of 14 parameters",
        ),
    ],
)
def test_auto_warns_of_checkpoints_that_it_does_not_resume_and_why(
    options: dict[str, Any], why: str, unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit(unfinished.parent, "auto", **options) == 0
    assert "begins a new run, at step 0, although there are checkpoints" in caplog.text
    assert f"{unfinished} has checkpoint-00000006, but {why}; resume={str(unfinished)!r} resumes it." in caplog.text


def test_extend_names_itself_where_no_run_matches(unfinished: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(unfinished.parent, "extend", train_dataset=points(41)) == 0
    assert 'resume="extend" begins a new run, at step 0, although there are checkpoints' in caplog.text


@pytest.mark.parametrize("where", ["the run", "its checkpoints", "a checkpoint", "a level above"])
def test_auto_warns_of_runs_around_and_below_the_folder_of_runs(
    where: str, unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = {
        "the run": unfinished,
        "its checkpoints": unfinished / "checkpoints",
        "a checkpoint": unfinished / "checkpoints" / "checkpoint-00000006",
        "a level above": unfinished.parent.parent,
    }
    assert fit(folders[where], "auto") == 0
    assert f"begins a new run, at step 0, in output_dir={str(folders[where])!r}." in caplog.text
    assert f"There are checkpoints in {unfinished}: output_dir={str(unfinished.parent)!r} finds" in caplog.text
    assert fit(unfinished.parent, "auto") == 6


def test_auto_names_an_older_run_that_is_not_finished(unfinished: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(unfinished.parent, dies_at=3)
    caplog.clear()
    assert fit(unfinished.parent, "auto") == 2
    assert f"An older run is not finished either: resume={str(unfinished)!r} resumes it." in caplog.text


def test_every_bit_of_run_json_is_checked_and_a_checkpoint_replaces_it(unfinished: Path) -> None:
    fingerprint = run_fingerprint(trainer())
    file = unfinished / "run.json"
    content = file.read_bytes()
    chance = random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        (found_run,) = find_runs(unfinished.parent)
        assert found_run.problem is not None
        assert found_run.mismatch(fingerprint) is None
        assert found_run.run.newest_checkpoint() == unfinished / "checkpoints" / "checkpoint-00000006"
        assert found_run.run.run_id == unfinished.name


@pytest.mark.parametrize("damage", ["deleted", "cut", "pipe"])
def test_a_run_without_a_usable_run_json_is_resumed(
    damage: str, unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = unfinished / "run.json"
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:100])
    elif damage == "pipe":
        os.mkfifo(file)
    assert fit(unfinished.parent, "auto") == 6
    assert f"{file} could not be used" in caplog.text
    assert [path.name for path in unfinished.parent.iterdir()] == [unfinished.name]
    (found_run,) = find_runs(unfinished.parent)
    assert (found_run.problem, found_run.run.is_finished) == (None, True)


def test_an_unreadable_run_json_does_not_stop_other_runs(
    unfinished: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pipe", "garbage", "folder"):
        (unfinished.parent / name).mkdir()
    os.mkfifo(unfinished.parent / "pipe" / "run.json")
    (unfinished.parent / "pipe" / "history.jsonl").write_text("")
    (unfinished.parent / "garbage" / "run.json").write_bytes(b"\xff{")
    (unfinished.parent / "folder" / "run.json").mkdir()
    assert main(["runs", str(unfinished.parent)]) == 0
    assert unfinished.name in capsys.readouterr().out
    assert fit(unfinished.parent, "auto") == 6
    assert "could not be used" not in caplog.text


def test_the_newest_run_is_the_one_begun_last_even_if_the_clock_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    fit(tmp_path)  # finished, an hour ahead
    monkeypatch.setattr(time, "time", now)
    fit(tmp_path, dies_at=7)
    assert fit(tmp_path, "auto") == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_a_copied_run_resumes_from_its_own_checkpoints(unfinished: Path) -> None:
    shutil.copytree(unfinished, unfinished.with_name("copy"))
    shutil.rmtree(unfinished)
    assert fit(unfinished.parent, "auto", model=network()) == 6


def test_renamed_checkpoints_are_ordered_by_the_steps_in_their_manifests(unfinished: Path) -> None:
    checkpoints = unfinished / "checkpoints"
    (checkpoints / "checkpoint-00000004").rename(checkpoints / "checkpoint-00000099")
    (checkpoints / "checkpoint-00000006").rename(checkpoints / "checkpoint-00000001")
    (listed,) = checkpoints_by_run(unfinished)
    assert [checkpoint.step for checkpoint in listed if checkpoint.kept] == [6]
    assert listed[-1].step == 6
    assert fit(unfinished.parent, "auto") == 6


@pytest.mark.parametrize("is_finished", [False, True])
def test_the_run_json_of_another_run_is_not_taken_for_that_of_the_folder(
    is_finished: bool, unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(unfinished.parent.with_name("others"), dies_at=None if is_finished else 3)
    (other,) = unfinished.parent.with_name("others").iterdir()
    shutil.copy(other / "run.json", unfinished / "run.json")
    assert fit(unfinished.parent, "auto") == 6
    assert f"it is the file of the run {other.name}, and checkpoint-00000006 belongs to another run" in caplog.text
    (found_run,) = find_runs(unfinished.parent)
    assert (found_run.problem, found_run.run.run_id) == (None, unfinished.name)


def test_a_link_to_a_run_is_no_second_run(unfinished: Path) -> None:
    (unfinished.parent / "latest").symlink_to(unfinished.name)
    (found_run,) = find_runs(unfinished.parent)
    assert found_run.run.path == unfinished
