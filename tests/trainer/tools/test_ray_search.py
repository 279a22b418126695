"""A search whose trials train at the same time, in processes of a real Ray cluster."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.tools.test_hyperparameter_search import Fragile
from trainer_lib import ConfigurationError, MissingPackageError, Trainer, UnsupportedError

GOOD = {"learning_rate": [0.1]}


class Scaled(Fragile):
    """Fragile, with an attribute of its own."""

    def __init__(self, *given: Any, factor: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.factor = factor

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        return super().compute_loss(model, batch) * self.factor


def scaled(output_dir: Path | None = None, metrics: Any = None, **args: Any) -> Trainer:
    settings = arguments(**{"num_train_epochs": 2, "output_dir": output_dir, **args})
    data = {"train_dataset": points(), "eval_dataset": points(16)}
    return Scaled(network(0.2), settings, **data, metrics=metrics, factor=0.5)


@pytest.fixture
def tune() -> Any:
    """Import Ray for a test, not when tests are collected: it takes two seconds."""
    return pytest.importorskip("ray.tune", reason="Ray is not installed")


@pytest.fixture
def cluster(tune: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a cluster of two cores whose processes and files are gone afterwards."""
    del tune
    ray: Any = import_module("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default its processes wait for all other tests
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    with TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets need a short path
        try:
            ray.init(num_cpus=2, object_store_memory=2**27, _temp_dir=folder, **options)
        except (OSError, RuntimeError) as error:
            pytest.skip(f"Ray does not start here: {error}")
        yield
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_trials_in_other_processes_are_those_runs(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_trainer = scaled(Path("runs"))  # relative: Ray's processes have other working directories
    weights = [weight.clone() for weight in model_trainer.model.parameters()]  # type: ignore[union-attr]
    sizes = {"per_device_train_batch_size": tune.grid_search([5, 8, 16])}
    result = model_trainer.search({**sizes, "learning_rate": [0.1]}, n=1, backend="ray")
    assert [trial["state"] for trial in result.trials] == ["failed", "complete", "complete"]
    for trial in result.trials[1:]:
        assert scaled(**trial["params"]).fit().metrics["eval_loss"] == trial["value"]
    assert result.best_value == min(trial["value"] for trial in result.trials[1:])
    assert result.args.per_device_train_batch_size == result.best_params["per_device_train_batch_size"]
    assert all(map(torch.equal, model_trainer.model.parameters(), weights))  # type: ignore[union-attr]
    folders = sorted((tmp_path / "runs" / "search").glob("trial-*"))
    assert [folder.name.rpartition("-")[0] for folder in folders] == [f"trial-{number}" for number in range(3)]
    facts = json.loads((folders[2] / "run.json").read_text())
    assert facts["metrics"]["eval_loss"] == result.trials[2]["value"]

    with pytest.raises(ConfigurationError, match=r"needs predictions.*Return both: \(loss, outputs\)"):
        scaled(metrics=["accuracy"]).search(GOOD, n=1, backend="ray")

    scheduler = tune.schedulers.FIFOScheduler()
    scheduler.on_trial_result = lambda *given: scheduler.STOP
    stopping = tune.TuneConfig(scheduler=scheduler)
    with pytest.raises(ConfigurationError, match="None of the 1 trials completed with a value"):
        model_trainer.search({"learning_rate": (0.01, 0.1, "log")}, n=1, backend="ray", study=stopping)


def test_what_ray_cannot_search_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(arguments(num_train_epochs=1), eval_dataset=points(24))
    with pytest.raises(ConfigurationError, match=r"Unknown backend 'rya'. Known: optuna, ray. Did you mean 'ray'"):
        made.search(GOOD, backend="rya")
    with pytest.raises(ConfigurationError, match=r"resources_per_trial=.'gpu': 1. is what a trial gets"):
        made.search(GOOD, resources_per_trial={"gpu": 1})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"ray\[tune\].*trainer_lib\[ray\]"):
        made.search(GOOD, backend="ray")


def test_what_ray_tune_cannot_search_is_refused(tune: Any) -> None:
    made = trainer(arguments(num_train_epochs=1), eval_dataset=points(24))
    changing = tune.schedulers.PopulationBasedTraining(hyperparam_mutations={"learning_rate": [0.1]})
    studies: list[tuple[Any, str]] = [
        ("asha", r"takes a ray.tune.TuneConfig as study \(got str\)"),
        (tune.TuneConfig(mode="max"), "The TuneConfig's mode is 'max', but this search needs 'min' for eval_loss"),
        (tune.TuneConfig(scheduler=changing), "PopulationBasedTraining continues a trial from another"),
    ]
    for study, message in studies:
        with pytest.raises((ConfigurationError, UnsupportedError), match=message):
            made.search(GOOD, backend="ray", study=study)
    with pytest.raises(ConfigurationError, match="'learning_rat', which is not an argument"):
        made.search(lambda trial: {"learning_rat": tune.uniform(0, 1)}, backend="ray")
    with pytest.raises(ConfigurationError, match="a part of it cannot be pickled"):
        Scaled(network(), arguments(), train_dataset=points(), eval_dataset=points(16), factor=Lock()).search(
            GOOD, backend="ray"
        )
