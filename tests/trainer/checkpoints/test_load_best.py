"""`load_best_at_end` where the best checkpoint is damaged or missing: the next best one is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injuries import spoil
from tests.faults.trainings import warned
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.events import Modifier, Run


class BeforeTheEnd(Modifier):
    """Does something to the checkpoint of a step once the last checkpoint is saved."""

    def __init__(self, step: int, harm: Callable[[Path], Any]) -> None:
        self._step, self._harm = step, harm

    def on_save_end(self, run: Run, folder: Path) -> None:
        if run.state.checkpoints[-1]["step"] == 15 and run.is_main_process:
            self._harm(folder.with_name(f"checkpoint-{self._step:08d}"))


def damage(checkpoint: Path) -> None:
    """Change the weights on the disk."""
    spoil(checkpoint / "model.safetensors")


def best_run(folder: Path, best: int, *callbacks: Modifier, processes: int = 1, resume: str = "never") -> Trainer:
    """Return a trainer of 15 steps whose best evaluation is the first or the last."""
    args = arguments(
        output_dir=folder,
        num_train_epochs=3,
        metric_for_best="loss",
        greater_is_better=best == 5,
        load_best_at_end=True,
        per_device_train_batch_size=8 // processes,
        resume=resume,
    )
    return trainer(args, eval_dataset=points(16), callbacks=list(callbacks))


def loss_at_best(model_trainer: Trainer) -> float:
    """Return the loss of the evaluation that the run calls the best."""
    best = model_trainer.state.best
    assert best is not None
    (loss,) = [
        entry["eval_loss"]
        for entry in model_trainer.state.history
        if entry["step"] == best.step and "eval_loss" in entry
    ]
    assert best.value == loss
    return loss


@pytest.mark.parametrize(
    ("harm", "best", "next_best", "reason"),
    [
        (damage, 5, 10, "It is now called checkpoint-00000005.damaged. The weights are those of step 10, the best one"),
        (shutil.rmtree, 5, 10, "There is no checkpoint of the best evaluation, of step 5."),
        (damage, 15, 15, "It is now called checkpoint-00000015.damaged. The weights are those of step 15, the best"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_next_best_is_loaded_where_the_best_checkpoint_is_damaged(
    harm: Callable[[Path], Any], best: int, next_best: int, reason: str, processes: int, tmp_path: Path
) -> None:
    def body() -> tuple[Any, ...]:
        model_trainer = best_run(tmp_path, best, BeforeTheEnd(best, harm), processes=processes)
        with warned() as warnings:
            result = model_trainer.fit()
        assert result.state.best is not None
        assert model_trainer.evaluate()["eval_loss"] == pytest.approx(loss_at_best(model_trainer), rel=1e-6)
        listed = [entry["step"] for entry in result.state.checkpoints]
        return result.status, result.state.best.step, listed, [line for line in warnings if reason in line]

    for rank, (status, loaded, listed, warnings) in enumerate(run_world(body, num_processes=processes)):
        assert (status, loaded, listed) == ("finished", next_best, [step for step in (5, 10, 15) if step != best])
        assert len(warnings) == (rank == 0), warnings

    again = best_run(tmp_path, best, resume="auto")
    assert again.fit().status == "finished"
    assert again.evaluate()["eval_loss"] == pytest.approx(loss_at_best(again), rel=1e-6)
    assert again.state.step == 15


def test_a_finished_run_whose_best_checkpoint_is_damaged_since_loads_the_next_best(tmp_path: Path) -> None:
    first = best_run(tmp_path, 5).fit()
    damage(Path(str(first.best_checkpoint)))
    again = best_run(tmp_path, 5, resume="auto")
    with warned() as warnings:
        result = again.fit()
    assert result.state.best is not None
    assert result.best_checkpoint is not None
    assert (result.state.best.step, result.best_checkpoint.name) == (10, "checkpoint-00000010")
    assert again.evaluate()["eval_loss"] == pytest.approx(loss_at_best(again), rel=1e-6)
    assert any("now called checkpoint-00000005.damaged. Resuming from" in line for line in warnings)


def test_without_another_evaluated_checkpoint_the_last_weights_stay(tmp_path: Path) -> None:
    def harm(checkpoint: Path) -> None:
        for path in checkpoint.parent.iterdir():
            damage(path)

    model_trainer = best_run(tmp_path, 5, BeforeTheEnd(5, harm))
    with warned() as warnings:
        result = model_trainer.fit()
    losses = {entry["step"]: entry["eval_loss"] for entry in result.history if "eval_loss" in entry}
    assert model_trainer.evaluate()["eval_loss"] == pytest.approx(losses[15], rel=1e-6)
    assert [path.name for path in sorted(next(tmp_path.glob("*/checkpoints")).iterdir())] == [
        f"checkpoint-{step:08d}.damaged" for step in (5, 10, 15)
    ]
    assert sum("The weights are those of step 15" in line for line in warnings) == 1
