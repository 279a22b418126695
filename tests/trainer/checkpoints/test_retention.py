"""Which checkpoints a run keeps, and that what it knows of them is what is there."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injuries import spoil
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.events import Callback, Modifier, Run


class Dies(Modifier):
    """Ends the run after a step."""

    def __init__(self, at: int, error: type[BaseException] = InterruptedError) -> None:
        self._at, self._error = at, error

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._at:
            raise self._error


def there(root: Path) -> list[int]:
    """Return the steps of the checkpoints under a folder."""
    return sorted(int(path.parent.name[-8:]) for path in root.rglob("manifest.json"))


def listed(checkpoints: list[dict[str, Any]]) -> list[int]:
    """Return the steps of those that a run knows of, each of which is there."""
    assert all((Path(one["path"]) / "manifest.json").is_file() for one in checkpoints)
    return [one["step"] for one in checkpoints]


def test_checkpoints_stay_at_an_interval(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_every": 2, "keep_last": 1, "keep_every": "3 steps"}
    with pytest.raises(InterruptedError):
        trainer(arguments(output_dir=tmp_path, max_steps=13, **options), callbacks=[Dies(9)]).fit()
    result = trainer(arguments(output_dir=tmp_path, max_steps=13, resume="auto", **options)).fit()
    # 6 is a multiple; 4 and 10 are the first after 3 and 9.
    assert listed(result.state.checkpoints) == there(tmp_path) == [4, 6, 10, 12, 13]


def test_of_an_interval_of_time_all_processes_keep_the_same(tmp_path: Path) -> None:
    def body() -> tuple[list[int], list[float]]:
        args = arguments(output_dir=tmp_path, max_steps=6, save_every=1, keep_last=1, keep_every="0.02 seconds")
        state = trainer(args, callbacks=[]).fit().state
        return listed(state.checkpoints), [one["seconds"] for one in state.checkpoints]

    one, other = run_world(body, timeout=60)
    assert one == other
    assert one[0] == there(tmp_path)


def test_what_a_run_knows_of_its_checkpoints_is_what_is_there_when_it_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": tmp_path, "save_every": 2, "keep_last": None, "eval_every": 4}
    with pytest.raises(InterruptedError):
        trainer(arguments(max_steps=12, **options), eval_dataset=points(8), callbacks=[Dies(9)]).fit()
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-00000002")
    spoil(folder / "checkpoints" / "checkpoint-00000008" / "model.safetensors")
    moved = folder.rename(tmp_path / "moved")
    seen: list[list[int]] = []

    class Looks(Callback):
        def on_fit_begin(self, run: Run) -> None:
            seen.append(listed(run.state.checkpoints))

    args = arguments(max_steps=12, resume="auto", **options)
    result = trainer(args, eval_dataset=points(8), callbacks=[Looks()]).fit()
    assert seen == [[4, 6]]
    assert listed(result.state.checkpoints) == [4, 6, 8, 10, 12]
    assert {Path(one["path"]).parent.parent for one in result.state.checkpoints} == {moved}
    assert [path.name for path in (moved / "checkpoints").glob("*.damaged")] == ["checkpoint-00000008.damaged"]
    # What is there and not listed is found: the last save of a run that ended while it was written.
    assert [one["metrics"].keys() for one in result.state.checkpoints[:2]] == [{"eval_loss"}, set()]


@pytest.mark.parametrize("error", [InterruptedError, KeyboardInterrupt])
def test_who_hears_of_the_end_knows_of_the_checkpoint_that_was_being_written(
    tmp_path: Path, error: type[BaseException]
) -> None:
    known: list[list[int]] = []

    class Hears(Callback):
        def on_exception(self, run: Run, error: BaseException) -> None:
            known.append(listed(run.state.checkpoints))

        def on_interrupt(self, run: Run) -> None:
            known.append(listed(run.state.checkpoints))

    args = arguments(output_dir=tmp_path, max_steps=9, save_every=4)
    with pytest.raises(error):
        trainer(args, callbacks=[Hears(), Dies(5, error)]).fit()
    assert known == [[4]]
