"""Which checkpoints a run keeps, and that its list of checkpoints matches the disk."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injuries import spoil
from tests.faults.trainings import warned
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.checkpointing.save.retention import automatic_states, steps_to_keep
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import CheckpointError, DamagedError


class Dies(Modifier):
    """Ends the run after a step."""

    def __init__(self, at: int, error: type[BaseException] = InterruptedError) -> None:
        self._at, self._error = at, error

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._at:
            raise self._error


def on_disk(root: Path) -> list[int]:
    """Return the steps of the checkpoints under a folder."""
    return sorted(int(path.parent.name[-8:]) for path in root.rglob("manifest.json"))


def listed(checkpoints: list[dict[str, Any]]) -> list[int]:
    """Return the steps of the checkpoints in a run's list, each of which must exist."""
    assert all((Path(checkpoint["path"]) / "manifest.json").is_file() for checkpoint in checkpoints)
    return [checkpoint["step"] for checkpoint in checkpoints]


def test_keep_every_keeps_checkpoints_at_an_interval(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_every": 2, "keep_last": 1, "keep_every": "3 steps"}
    with pytest.raises(InterruptedError):
        trainer(arguments(output_dir=tmp_path, max_steps=13, **options), callbacks=[Dies(9)]).fit()
    result = trainer(arguments(output_dir=tmp_path, max_steps=13, resume="auto", **options)).fit()
    # 6 is a multiple; 4 and 10 are the first after 3 and 9.
    assert listed(result.state.checkpoints) == on_disk(tmp_path) == [4, 6, 10, 12, 13]


def test_a_run_that_died_after_its_last_save_keeps_no_more(tmp_path: Path) -> None:
    class DiesAfterSave(Modifier):
        order = -1  # before older checkpoints are deleted

        def on_save_end(self, run: Run, folder: Path) -> None:
            if run.state.step == 6:
                raise InterruptedError

    options: dict[str, Any] = {"output_dir": tmp_path, "max_steps": 6, "save_every": 2, "keep_last": 1}
    with pytest.raises(InterruptedError):
        trainer(arguments(**options, save_in_background=False), callbacks=[DiesAfterSave()]).fit()
    assert on_disk(tmp_path) == [4, 6]
    result = trainer(arguments(resume="auto", **options)).fit()
    assert listed(result.state.checkpoints) == on_disk(tmp_path) == [6]


def test_all_ranks_keep_the_same_checkpoints_with_an_interval_of_time(tmp_path: Path) -> None:
    def body() -> tuple[list[int], list[float]]:
        args = arguments(output_dir=tmp_path, max_steps=6, save_every=1, keep_last=1, keep_every="0.02 seconds")
        state = trainer(args, callbacks=[]).fit().state
        return listed(state.checkpoints), [checkpoint["seconds"] for checkpoint in state.checkpoints]

    first, other = run_world(body, timeout=60)
    assert first == other
    assert first[0] == on_disk(tmp_path)


def test_a_resumed_run_lists_the_checkpoints_that_exist(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": tmp_path, "save_every": 2, "keep_last": None, "eval_every": 4}
    with pytest.raises(InterruptedError):
        trainer(arguments(max_steps=12, **options), eval_dataset=points(8), callbacks=[Dies(9)]).fit()
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-00000002")
    spoil(folder / "checkpoints" / "checkpoint-00000008" / "model.safetensors")
    moved = folder.rename(tmp_path / "moved")
    at_begin: list[list[int]] = []

    class ListsCheckpoints(Callback):
        def on_fit_begin(self, run: Run) -> None:
            at_begin.append(listed(run.state.checkpoints))

    args = arguments(max_steps=12, resume="auto", **options)
    result = trainer(args, eval_dataset=points(8), callbacks=[ListsCheckpoints()]).fit()
    assert at_begin == [[4, 6]]
    assert listed(result.state.checkpoints) == [4, 6, 8, 10, 12]
    assert {Path(checkpoint["path"]).parent.parent for checkpoint in result.state.checkpoints} == {moved}
    assert [path.name for path in (moved / "checkpoints").glob("*.damaged")] == ["checkpoint-00000008.damaged"]
    # A checkpoint that exists and is not listed is found: the last save of a run that ended while it was written.
    assert [checkpoint["metrics"].keys() for checkpoint in result.state.checkpoints[:2]] == [{"eval_loss"}, set()]


@pytest.mark.parametrize("error", [InterruptedError, KeyboardInterrupt])
def test_callbacks_at_the_end_see_the_checkpoint_that_was_being_written(
    tmp_path: Path, error: type[BaseException]
) -> None:
    at_end: list[list[int]] = []

    class ListsCheckpoints(Callback):
        def on_exception(self, run: Run, error: BaseException) -> None:
            at_end.append(listed(run.state.checkpoints))

        def on_interrupt(self, run: Run) -> None:
            at_end.append(listed(run.state.checkpoints))

    args = arguments(output_dir=tmp_path, max_steps=9, save_every=4)
    with pytest.raises(error):
        trainer(args, callbacks=[ListsCheckpoints(), Dies(5, error)]).fit()
    assert at_end == [[4]]


def test_folders_without_a_complete_checkpoint_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_3").mkdir()
    (tmp_path / "checkpoint_3" / "notes.txt").write_text("by hand")
    assert automatic_states(tmp_path) == {}


@pytest.mark.parametrize("is_better_when_greater", [False, True])
def test_the_best_checkpoints_are_those_of_the_metric(is_better_when_greater: bool) -> None:
    saved = [{"step": step, "metrics": {"score": score}} for step, score in ((1, 0.3), (2, 0.1), (3, 0.4), (4, 0.2))]
    kept = steps_to_keep(saved, 1, 2, metric="score", greater_is_better=is_better_when_greater)
    assert kept == ({1, 3, 4} if is_better_when_greater else {2, 4})


def test_a_manifest_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: Permission denied") as caught:
        read_manifest(tmp_path)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_copied_checkpoint_of_another_run_is_set_aside_not_replaced(processes: int, tmp_path: Path) -> None:
    def body(dies_at: int = 99, **options: Any) -> list[str]:
        args = arguments(output_dir=tmp_path, save_every=2, max_steps=8, seed=1, **options)
        with warned() as warnings, contextlib.suppress(InterruptedError):
            trainer(args, train_dataset=points(80), callbacks=[Dies(dies_at)]).fit()
        return [line for line in warnings if "another run" in line]

    run_world(body, num_processes=1)
    (other,) = tmp_path.iterdir()
    copied = other / "checkpoints" / "checkpoint-00000006"
    run_world(lambda: body(dies_at=5), num_processes=processes)
    (own,) = (path for path in tmp_path.iterdir() if path != other)
    shutil.copytree(copied, own / "checkpoints" / copied.name)
    facts = read_manifest(copied)
    for rank, warnings in enumerate(run_world(lambda: body(resume=str(own)), num_processes=processes)):
        assert len(warnings) == (rank == 0)
        assert all(f"another run, {other.name}. It is renamed to {copied.name}.other-run" in line for line in warnings)
    aside = own / "checkpoints" / f"{copied.name}.other-run"
    verify_state(aside)
    assert read_manifest(aside) == facts
    assert read_manifest(own / "checkpoints" / copied.name).run_id == own.name
    names = sorted(path.name for path in (own / "checkpoints").iterdir())
    assert names == [*(f"checkpoint-0000000{step}" for step in (4, 6)), aside.name, "checkpoint-00000008"]
