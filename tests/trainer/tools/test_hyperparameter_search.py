"""The search for arguments: trials that are runs of their own, on one process and on two."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Interrupted, MissingPackageError, Trainer
from trainer_lib.callbacks import EarlyStopping
from trainer_lib.events import Callback, Run
from trainer_lib.processes.exit_codes import by_signal
from trainer_lib.trainer.fit import fit_run

optuna: Any = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[3]
# A search that imports optuna first, and whether its trainer is gone with its last reference.
SEARCHED = """
import gc, weakref
from tests.trainer.tasks import arguments, points, trainer

def searched():
    found = trainer(arguments(num_train_epochs=1), eval_dataset=points(24))
    found.search({"learning_rate": [0.1]}, n=1)
    return weakref.ref(found)

left = searched()
gc.collect()
print("gone" if left() is None else "left")
"""
SPACE = {"learning_rate": (1e-3, 0.3, "log"), "weight_decay": [0.0, 0.1], "gradient_accumulation_steps": (1, 2)}


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def made(output_dir: Path | None = None, **options: Any) -> Trainer:
    args = {"num_train_epochs": 1, "output_dir": output_dir, **options.pop("args", {})}
    settings: dict[str, Any] = {"eval_dataset": points(24), "metrics": ["accuracy"], "model": network(0.2), **options}
    return trainer(arguments(**args), **settings)


def test_a_trial_is_the_run_with_those_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_trainer = made(tmp_path / "runs", args={"resume": "auto"}, callbacks=[EarlyStopping("eval_loss")])
    result = model_trainer.search(SPACE, n=3)
    model_trainer.accelerator.free_memory()
    assert "epoch" not in capsys.readouterr().out  # lines of a run
    assert [trial["state"] for trial in result.trials] == ["complete"] * 3
    for trial in result.trials:
        other = made(args=trial["params"])
        assert other.fit().metrics["eval_loss"] == trial["value"]
        other.accelerator.free_memory()
    best = min(result.trials, key=lambda trial: trial["value"])
    assert (result.metric, result.best_value, result.best_params) == ("eval_loss", best["value"], best["params"])
    assert result.args.learning_rate == best["params"]["learning_rate"]
    assert result.args.output_dir == model_trainer.args.output_dir
    assert result.study.best_trial.number == best["number"]
    table = result.to_pandas()
    assert table["value"].tolist() == [trial["value"] for trial in result.trials]
    assert table["weight_decay"].tolist() == [trial["params"]["weight_decay"] for trial in result.trials]
    assert str(result).startswith(f"eval_loss {best['value']:.6g} with learning_rate=")
    folders = sorted((tmp_path / "runs" / "search").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == ["trial-0", "trial-1", "trial-2"]
    for folder, trial in zip(folders, result.trials, strict=True):
        facts = json.loads((folder / "run.json").read_text())
        assert facts["metrics"]["eval_loss"] == trial["value"]
        assert (folder / "history.jsonl").stat().st_size
    assert made(tmp_path / "runs").fit(resume="auto").state.step == 5  # there is no run to resume


def test_the_same_seed_tries_the_same() -> None:
    def params(**args: Any) -> Any:
        model_trainer = made(args={"num_train_epochs": 0.2, **args})
        result = model_trainer.search(
            lambda trial: {"learning_rate": trial.suggest_float("rate", 0.1, 0.5)}, n=2, metric="accuracy"
        )
        model_trainer.accelerator.free_memory()
        assert (result.metric, result.study.direction.name) == ("eval_accuracy", "MAXIMIZE")
        assert result.best_value == max(trial["value"] for trial in result.trials)
        return [trial["params"] for trial in result.trials]

    assert params() == params()
    assert params()[0]["learning_rate"] != params(seed=7)[0]["learning_rate"]


def test_a_trial_that_is_not_worth_it_is_ended_early() -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=6)
    study = optuna.create_study(pruner=pruner)
    model_trainer = made(args={"num_train_epochs": 4})
    seen: list[int] = []

    class Steps(Callback):
        def on_fit_end(self, run: Run) -> None:
            seen.append(run.state.step)
            assert run.control.reason is None or "the trial was pruned at" in run.control.reason

    model_trainer.events.add(Steps())
    with pytest.raises(ConfigurationError, match="None of the 2 trials completed"):
        model_trainer.search({"learning_rate": [0.1]}, n=2, study=study)
    assert seen == [10, 10]  # the second evaluation is the first that counts
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "PRUNED"]
    assert list(study.trials[0].intermediate_values) == [5, 10]


class Fragile(Trainer):
    """Runs out of memory, is not finite, or has a mistake, as the batch size asks for."""

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        kind = self.args.per_device_train_batch_size
        if model.training and kind == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if model.training and kind == 5:
            raise KeyError("a mistake")
        loss = cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if model.training and kind == 6 else loss


def grid(*sizes: int) -> Any:
    sampler = optuna.samplers.GridSampler({"per_device_train_batch_size": list(sizes)}, seed=0)
    return {"space": {"per_device_train_batch_size": list(sizes)}, "study": optuna.create_study(sampler=sampler)}


def fragile() -> Trainer:
    return Fragile(network(), arguments(num_train_epochs=1), train_dataset=points(), eval_dataset=points(16))


@pytest.mark.slow
def test_a_search_does_not_keep_its_trainer_alive() -> None:
    command = [sys.executable, "-c", SEARCHED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "gone"


def test_a_trial_that_fails_is_told_and_the_search_goes_on() -> None:
    result = fragile().search(**grid(4, 5, 6, 8), n=4)
    states = {trial["params"]["per_device_train_batch_size"]: trial["state"] for trial in result.trials}
    assert states == {4: "failed", 5: "failed", 6: "failed", 8: "complete"}
    assert result.best_params == {"per_device_train_batch_size": 8}
    with pytest.raises(
        ConfigurationError, match=r"None of the 1 trials .* last failure: NonFiniteError: In step 1 the loss is"
    ):
        fragile().search(**grid(6), n=1)


class Interrupts(Callback):
    """Asks the second trial to end, as a signal does."""

    def on_step_end(self, run: Run) -> None:
        if run.args.run_name == "trial-1" and run.state.step == 2:
            run.control.interruption = by_signal(signal.SIGINT)


@pytest.mark.parametrize("is_notebook", [True, False])
def test_who_interrupts_a_trial_ends_the_search(monkeypatch: pytest.MonkeyPatch, is_notebook: bool) -> None:
    monkeypatch.setattr(fit_run, "is_interactive", lambda: is_notebook)
    model_trainer = made(callbacks=[Interrupts()])
    before = [weight.clone() for weight in model_trainer.model.parameters()]  # type: ignore[union-attr]
    study = optuna.create_study()
    if is_notebook:
        result = model_trainer.search(SPACE, n=5, study=study)
        assert [trial["state"] for trial in result.trials] == ["complete", "failed"]
    else:
        with pytest.raises(Interrupted):
            model_trainer.search(SPACE, n=5, study=study)
    assert len(study.trials) == 2
    assert all(map(torch.equal, model_trainer.model.parameters(), before))  # type: ignore[union-attr]
    assert model_trainer.state.status == "new"


@pytest.mark.slow
def test_processes_train_the_same_trials() -> None:
    def find() -> Any:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        model_trainer = made(args={"per_device_train_batch_size": 4})
        result = model_trainer.search(SPACE, n=2)
        model_trainer.accelerator.free_memory()
        again = made(args={"per_device_train_batch_size": 4, **result.best_params}).fit().metrics["eval_loss"]
        failing = Fragile(network(), arguments(num_train_epochs=1), train_dataset=points(), eval_dataset=points(16))
        failing.accelerator.free_memory()
        failed = failing.search(**grid(6, 8), n=2)
        pruning = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.0))
        failing.accelerator.free_memory()
        message = ""
        try:
            made(args={"num_train_epochs": 4}).search({"learning_rate": [0.1]}, n=1, study=pruning)
        except ConfigurationError as error:
            message = str(error)
        return result.trials, result.best_value == again, failed.trials, message, result.study is None

    first, second = run_world(find, (), 2, timeout=90)
    assert first[:-1] == second[:-1]
    trials, is_same, failed, text, is_without_study = first
    assert len(trials) == 2
    assert is_same
    assert sorted(trial["state"] for trial in failed) == ["complete", "failed"]
    assert text == "None of the 1 trials completed with a value."
    assert (is_without_study, second[-1]) == (False, True)


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[tuple[Any, str]] = [
        ({}, "must be a dict by the names of arguments"),
        ({"learning_rat": [0.1]}, "'learning_rat', which is not an argument of TrainingArguments. Did you mean"),
        ({"mixed_precision": ["no", "bf16"]}, "'mixed_precision', which sets up the accelerator"),
        ({"learning_rate": (0.0, 1.0, "log")}, "with low above 0"),
        ({"learning_rate": (1.0, 0.1)}, r"space\['learning_rate'\]=\(1.0, 0.1\) must be a list"),
        ({"learning_rate": 0.1}, "must be a list of numbers or strings"),
        ({"warmup": []}, "must be a list of numbers or strings"),
        (lambda trial: [trial], r"space\(trial\) returned a list"),
        (lambda trial: {"output_dir": "there"}, "'output_dir', which is set by the search"),
        ({"learning_rate": [0.1, -1.0]}, r"space\['learning_rate'\]: learning_rate must be a finite number"),
        ({"learning_rate": (-1.0, 0.1)}, r"space\['learning_rate'\]: learning_rate must be a finite .*got -1.0"),
        ({"lr_scheduler": ["linear", "cosin"]}, r"space\['lr_scheduler'\]: Unknown lr_scheduler 'cosin'"),
    ]
    for space, message in spaces:
        with pytest.raises(ConfigurationError, match=message):
            made().search(space, n=1)
    good = {"learning_rate": [0.1]}
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"n": 0}, "n must be a whole number of at least 1"),
        (
            {"metric": "f1"},
            r"search\(metric='f1'\) is not a metric of the evaluations. These are: eval_loss, eval_acc",
        ),
        ({"metric": 7}, r'metric must be the name of a metric, such as "eval_loss" \(got 7\)'),
        ({"metric": "gain"}, "cannot be inferred from the name of the metric 'gain'"),
        (
            {"study": optuna.create_study(direction="maximize")},
            "The study's direction is maximize, but this search must minimize",
        ),
    )
    for options, message in bad:
        with pytest.raises(ConfigurationError, match=message):
            made().search(good, **options)
    with pytest.raises(ConfigurationError, match="needs evaluations, but there are none"):
        made(eval_dataset=None, metrics=None).search(good)
    model = nn.Linear(6, 2)
    with pytest.raises(ConfigurationError, match="makes a new optimizer for each trial"):
        made(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).search(good)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"optuna is not installed.*trainer_lib\[search\]"):
        made().search(good)
