"""Resuming with other world sizes, batch sizes and arguments: each sample once, and a log of what changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import run_launched
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, StateError, TrainingArguments
from trainer_lib.trainer.arguments.declaration import OnResume, settings
from trainer_lib.trainer.result import FitResult

Layout = tuple[int, int, int]  # processes, the batch of each, and how many of them make an update

GLOBAL = 16  # samples an update; 77 samples make 5 updates a pass, of which the last is short


def fit(layout: Layout, resume: str | Path = "never", **options: Any) -> FitResult:
    """Train two passes over 77 points."""
    _, batch, steps = layout
    fixed: dict[str, Any] = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "log_every": 1}
    settings: dict[str, Any] = {"lr_scheduler": "cosine", "warmup": 2, "resume": str(resume), **fixed, **options}
    return trainer(arguments(**settings), train_dataset=points(77)).fit()


def logged_losses(result: FitResult) -> list[tuple[int, float, float, float]]:
    return [
        (entry["step"], entry["epoch"], entry["learning_rate"], entry["loss"])
        for entry in result.history
        if "loss" in entry
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two passes of 10 updates of 4 samples, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("runs")
    small("never", output_dir=folder, save_every=1, keep_last=None, eval_every=5)
    return next(folder.iterdir())


def small(resume: str | Path, **options: Any) -> FitResult:
    sizes = {"per_device_train_batch_size": 4, "log_every": 1, "eval_every": 1000, **options}
    return trainer(arguments(resume=str(resume), **sizes), eval_dataset=points(8)).fit()


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"checkpoint-{step:08d}"


def rates(result: FitResult) -> dict[int, float]:
    return {entry["step"]: entry["learning_rate"] for entry in result.history if "learning_rate" in entry}


@pytest.mark.parametrize(
    ("step", "batch", "steps", "behind", "length"),
    [
        # 20 of 40 samples of the second pass are left: 3 updates of 8, after what counts as 7 of 10.
        pytest.param(15, 8, 18, 7, 5, id="larger"),
        pytest.param(15, 2, 25, 30, 20, id="smaller"),
        pytest.param(10, 8, 15, 5, 5, id="larger, at the end of a pass"),
    ],
)
def test_with_another_global_batch_schedule_and_end_follow_the_samples(
    run: Path, step: int, batch: int, steps: int, behind: int, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    result = small(at(run, step), per_device_train_batch_size=batch)
    assert (result.state.step, result.state.epoch, result.state.samples) == (steps, 2, 80)
    assert f"{steps} steps, {length} per epoch, 2 epochs, resumed at step {step}" in capsys.readouterr().err
    made = rates(result)
    for number in range(step + 1, steps + 1):
        # The rate in force once the update is made.
        assert made[number] == pytest.approx(0.05 * (1 - (behind + number - step) / (2 * length)), abs=1e-9)
    assert result.history[-2]["epoch"] == 2


def test_with_a_number_of_updates_the_schedule_goes_by_updates(run: Path) -> None:
    result = small(at(run, 15), per_device_train_batch_size=8, max_steps=20, num_train_epochs=None)
    assert (result.state.step, result.state.epochs) == (20, 2.4)
    assert rates(result)[16] == pytest.approx(0.05 * (1 - 16 / 20))


def test_going_on_twice_moves_the_schedule_once(run: Path, tmp_path: Path) -> None:
    whole = small(at(run, 15), per_device_train_batch_size=2)
    small(at(run, 15), per_device_train_batch_size=2, output_dir=tmp_path, save_every=1, keep_last=None)
    (other,) = tmp_path.iterdir()
    assert rates(small(at(other, 18), per_device_train_batch_size=2)) == rates(whole)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_changed_is_listed_in_one_entry(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    small(at(run, 15), learning_rate=0.01, seed=7, log_every=2, progress_bar=None)
    (entry,) = [record.getMessage() for record in caplog.records if "changed arguments" in record.getMessage()]
    assert entry.splitlines() == [
        f"Resuming from {at(run, 15)} with changed arguments:",
        "  seed: 42 → 7 (the checkpoint's value counts: the order of the data and the generators are restored)",
        "  learning_rate: 0.05 → 0.01",
        "  log_every: 1 → 2",
        "  eval_every: 5 → 1000",
        "  save_every: 1 → None",
        "  keep_last: None → 3",
    ]


def test_the_same_arguments_are_not_worth_a_word(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    small(at(run, 15), save_every=1, keep_last=None, eval_every=5, output_dir=run.parent / "others")
    assert caplog.messages == []


def test_the_seed_is_that_of_the_checkpoint(run: Path) -> None:
    losses = [entry["loss"] for entry in small(at(run, 15), seed=7, data_seed=8).history if "loss" in entry]
    assert losses == [entry["loss"] for entry in small(at(run, 15)).history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{"shuffle": False}, {"limit_train_batches": 5}, {"optimizer": "sgd"}, {"sample_weights": [1.0] * 40}],
)
def test_what_cannot_be_gone_on_with_is_refused_by_name(run: Path, options: dict[str, Any]) -> None:
    (name,) = options
    assert settings(TrainingArguments)[name].on_resume is OnResume.REFUSED
    with pytest.raises(ConfigurationError, match=rf"cannot be resumed with a changed {name} \({name}: .* → .*\)"):
        small(at(run, 15), **options)


def test_as_many_limited_batches_of_another_size_are_other_samples(tmp_path: Path) -> None:
    small("never", output_dir=tmp_path, limit_train_batches=5, save_every=2)
    (run,) = tmp_path.iterdir()
    with pytest.raises(
        StateError, match=r"saved with 20 samples per pass.* has 40 now.*limit them to the same number of samples"
    ):
        small(at(run, 8), limit_train_batches=5, per_device_train_batch_size=8)


@pytest.mark.parametrize("schedule", ["linear", "constant", "plateau"])
def test_another_learning_rate_takes_effect_at_once(schedule: str, tmp_path: Path) -> None:
    small("never", output_dir=tmp_path, save_every=5, lr_scheduler=schedule, keep_last=None)
    (run,) = tmp_path.iterdir()
    old = rates(small(at(run, 15), lr_scheduler=schedule))
    new = rates(small(at(run, 15), lr_scheduler=schedule, learning_rate=0.01))
    for step in range(16, 21):
        assert new[step] == pytest.approx(old[step] / 5)
    assert new[15] == old[15]


def test_another_learning_rate_under_a_schedule_of_ones_own(tmp_path: Path) -> None:
    def fits(resume: str | Path, **options: Any) -> FitResult:
        args = arguments(resume=str(resume), log_every=1, **options)
        return trainer(args, scheduler=lambda value: torch.optim.lr_scheduler.StepLR(value, 2, 0.5)).fit()

    fits("never", output_dir=tmp_path, save_every=5)
    (run,) = tmp_path.iterdir()
    old, new = (rates(fits(at(run, 5), learning_rate=rate)) for rate in (0.05, 0.01))
    assert [new[step] for step in range(6, 11)] == pytest.approx([old[step] / 5 for step in range(6, 11)])


def test_another_weight_decay_takes_effect(tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path, weight_decay=0.1)).fit()
    (run,) = tmp_path.iterdir()
    model_trainer = trainer(arguments(resume=str(at(run, 5)), weight_decay=0.3))
    model_trainer.fit()
    assert [group["weight_decay"] for group in model_trainer.optimizers["default"].param_groups] == [0.3, 0.0]
    with pytest.raises(StateError, match=r"follow from weight_decay \(0.1 → 0.0\), and must be the same"):
        trainer(arguments(resume=str(at(run, 5)), weight_decay=0.0)).fit()


def test_the_best_by_another_metric_is_sought_anew(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(resume=str(at(run, 15)), per_device_train_batch_size=4, metric_for_best="accuracy")
    result = trainer(args, eval_dataset=points(8), metrics=["accuracy"]).fit()
    assert "of step 15, was chosen by eval_loss. From now on the best is chosen by eval_accuracy." in caplog.text
    assert result.state.best is not None
    assert (result.state.best.metric, result.state.best.step) == ("eval_accuracy", 20)


# -- more of a finished run --------------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"lr_scheduler": "constant", "save_every": "1 epoch", "eval_every": "1 epoch"}


def test_a_finished_run_is_extended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = small("never", output_dir=tmp_path / "whole", num_train_epochs=4, **LONG)
    short = small("never", output_dir=tmp_path / "parts", **LONG)
    assert short.state.step == 20
    same = small("auto", output_dir=tmp_path / "parts", num_train_epochs=4, **LONG)
    assert same.state == short.state
    assert 'To train it further, give resume="extend" and more steps or epochs' in caplog.text
    longer = small("extend", output_dir=tmp_path / "parts", num_train_epochs=4, **LONG)
    assert "num_train_epochs: 2 → 4" in caplog.text
    assert longer.state.run_id == short.state.run_id
    assert logged_losses(longer) == logged_losses(whole)
    assert longer.state.step == 40
    assert json.loads((next((tmp_path / "parts").iterdir()) / "run.json").read_text())["status"] == "finished"


def test_extending_begins_and_goes_on_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = small("extend", output_dir=tmp_path, **LONG)
    assert first.state.step == 20
    again = small("extend", output_dir=tmp_path, **LONG)
    assert (again.state.step, again.state.run_id) == (20, first.state.run_id)
    assert "There is nothing left to train: the run is at step 20 already." in caplog.text


def test_what_left_no_checkpoint_cannot_be_extended(tmp_path: Path) -> None:
    small("never", output_dir=tmp_path, save_every="never", keep_best=0)
    with pytest.raises(ConfigurationError, match="is finished and has no checkpoint to resume from"):
        small("extend", output_dir=tmp_path, num_train_epochs=4)
    with pytest.raises(ConfigurationError, match='resume="extend" looks for a run in output_dir'):
        arguments(resume="extend")


# -- an elastic restart ------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.safety.test_elastic_restarts import logged_losses
from trainer_lib.events import Callback

class Kills(Callback):
    def on_step_end(self, run):
        if run.state.step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
model = network(dropout=0.3)
args = arguments(output_dir=folder, resume="auto", num_train_epochs=3, save_every=2, log_every=3)
result = trainer(args, model=model, train_dataset=points(75), callbacks=[Kills()]).fit()
weights = [parameter.tolist() for parameter in model.parameters()]
if os.environ["RANK"] == "0":
    (folder.parent / "killed.json").write_text(json.dumps([logged_losses(result), weights, result.state.samples]))
"""


def uninterrupted() -> list[Any]:
    """Do what the script does, but for the kill."""
    model = network(dropout=0.3)
    result = trainer(arguments(num_train_epochs=3, log_every=3), model=model, train_dataset=points(75)).fit()
    return [logged_losses(result), [parameter.tolist() for parameter in model.parameters()], result.state.samples]


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("`SIGKILL` to one of two processes; the launcher restarts")
def test_a_killed_rank_under_the_launcher_goes_on_to_the_bit(tmp_path: Path) -> None:
    ended = run_launched(SCRIPT, tmp_path, str(tmp_path / "killed"), options=["--max_restarts", "2"])
    assert ended.returncode == 0, ended.stderr
    assert re.search("resumed at step [246]", ended.stderr)  # what was being written was lost with the rank
    (whole, _) = run_world(uninterrupted, (), 2, timeout=60)
    assert json.loads((tmp_path / "killed.json").read_text()) == json.loads(json.dumps(whole))
    assert len(list((tmp_path / "killed").iterdir())) == 1  # a single run
