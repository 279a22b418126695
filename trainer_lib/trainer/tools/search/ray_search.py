"""Search with Ray Tune: trials that train at the same time, each in a process of a Ray cluster."""

import dataclasses
import math
import pickle
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, UnsupportedError
from trainer_lib.foundation.imports import require
from trainer_lib.trainer.tools.search.search_result import SearchResult, best_of
from trainer_lib.trainer.tools.search.search_space import Choices, Range, Space, check_names, read_space
from trainer_lib.trainer.tools.search.sent_trainer import pack
from trainer_lib.trainer.tools.search.trial import FOLDER, TOOL, Reporting, Trial
from trainer_lib.trainer.trainer_interface import TrainerInterface

_COMPLETE = "is_complete"
_WRONG = "wrong_setup"
_STEP = "step"


def search_with_ray(
    trainer: TrainerInterface,
    space: Space,
    n: int,
    metric: str,
    is_more: bool,
    tune_config: Any,
    resources_per_trial: Mapping[str, float] | None,
) -> SearchResult:
    """Search; see `Trainer.search`."""
    if trainer.accelerator.use_distributed:
        raise UnsupportedError(
            f'search(backend="ray") starts the processes of its trials itself, and this script runs on '
            f"{trainer.accelerator.num_processes} ranks. Start it without a launcher, or leave out backend=."
        )
    ray, tune = require("ray", "ray", "ray[tune]"), require("ray.tune", "ray", "ray[tune]")
    domains = _domains(tune, space)
    settings = _settings(tune, trainer, tune_config, n, metric, is_more)
    sent = pack(trainer, TOOL, ray.cloudpickle.Pickler)
    root = trainer.args.output_folder
    with _cluster(ray), tempfile.TemporaryDirectory() as temporary:
        trainable = tune.with_parameters(partial(_train, metric=metric, is_more=is_more), sent=sent)
        tuner = tune.Tuner(
            tune.with_resources(trainable, dict(resources_per_trial or _resources(trainer))),
            param_space=domains,
            tune_config=settings,
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str((root / FOLDER).absolute()) if isinstance(root, Path) else temporary,
                stop=_stopper(tune),
                verbose=0,
            ),
        )
        results = tuner.fit()
    for result in results:
        if (wrong := (result.metrics or {}).get(_WRONG)) is not None:
            raise ConfigurationError(wrong)
    records = [_record(number, result, metric) for number, result in enumerate(results)]
    failures = [str(getattr(result.error, "cause", result.error)) for result in results if result.error is not None]
    best = best_of(records, is_more, failures[-1] if failures else None)
    return SearchResult(
        metric=metric,
        best_params=best["params"],
        best_value=best["value"],
        args=dataclasses.replace(trainer.args, **best["params"]),
        trials=records,
        study=results,
    )


# -- in a process of a trial -----------------------------------------------------------------------------------------


class _FailedTrialError(Exception):
    """A trial has failed, and the search continues."""


class _Study:
    """Reports to Ray Tune, which ends the process of a trial that its scheduler stops."""

    def __init__(self, tune: Any, metric: str) -> None:
        self._tune, self._metric = tune, metric

    def report(self, value: float, step: int) -> None:
        """Report an evaluation; if the scheduler stops the trial, its process ends here."""
        self._tune.report({self._metric: value, _STEP: step})

    def should_prune(self) -> bool:
        """Return that the trial continues: otherwise the process had ended at its report."""
        return False


def _train(config: dict[str, Any], sent: bytes, metric: str, is_more: bool) -> dict[str, Any]:
    """Train one trial, and return its last metric."""
    tune = import_module("ray.tune")
    trainer = pickle.loads(sent)  # noqa: S301 - what the search sent
    number = int(tune.get_context().get_trial_id().rpartition("_")[2])
    trial = Trial(trainer, number, config, Reporting(metric, _Study(tune, metric)))
    try:
        trial.train(is_more)
    except TrainerLibError as error:  # of all trials
        return {metric: math.nan, _WRONG: str(error)}
    if trial.failure is not None:
        raise _FailedTrialError(trial.failure)
    return {metric: trial.value, _COMPLETE: True}


# -- in the process of the search ------------------------------------------------------------------------------------


@contextmanager
def _cluster(ray: Any) -> Generator[None]:
    """Connect to a cluster, or start one on this machine, unless the script has done so."""
    if ray.is_initialized():
        yield
        return
    ray.init(configure_logging=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _stopper(tune: Any) -> Any:
    """Return a stopper that ends the search if a trial reports a wrong setup, which all trials share."""

    class StopsIfWrong(tune.Stopper):
        is_wrong = False

        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            self.is_wrong = self.is_wrong or _WRONG in result
            return _WRONG in result

        def stop_all(self) -> bool:
            return self.is_wrong

    return StopsIfWrong()


def _resources(trainer: TrainerInterface) -> dict[str, float]:
    return {"cpu": 1} if trainer.accelerator.device.type == "cpu" else {"cpu": 1, "gpu": 1}


def _domains(tune: Any, space: Space) -> dict[str, Any]:
    """Return the space as Ray Tune's domains."""

    def is_domain(given: Any) -> bool:
        return isinstance(given, tune.search.sample.Domain) or (isinstance(given, dict) and "grid_search" in given)

    if callable(space):
        space = space(None)
        check_names(space)
    return {name: _domain(tune, given) for name, given in read_space(space, is_domain).items()}


def _domain(tune: Any, description: Any) -> Any:
    if isinstance(description, Choices):
        return tune.choice(description.values)
    if not isinstance(description, Range):
        return description
    low, high = description.low, description.high
    if description.is_whole:
        return (tune.lograndint if description.is_log else tune.randint)(low, high + 1)
    return (tune.loguniform if description.is_log else tune.uniform)(low, high)


def _settings(tune: Any, trainer: TrainerInterface, given: Any, n: int, metric: str, is_more: bool) -> Any:
    """Return a `TuneConfig` for this search."""
    mode = "max" if is_more else "min"
    if given is None:
        given = tune.TuneConfig(search_alg=tune.search.BasicVariantGenerator(random_state=trainer.args.seed))
    if not isinstance(given, tune.TuneConfig):
        raise ConfigurationError(
            f'search(backend="ray") takes a ray.tune.TuneConfig as study (got {type(given).__name__}): '
            "study=TuneConfig(scheduler=ASHAScheduler())."
        )
    if given.mode not in (None, mode):
        raise ConfigurationError(
            f"The TuneConfig's mode is {given.mode!r}, but this search needs {mode!r} for {metric}. Leave it out, "
            "or give greater_is_better=…."
        )
    if isinstance(given.scheduler, tune.schedulers.PopulationBasedTraining):
        raise UnsupportedError(
            f"{type(given.scheduler).__name__} continues a trial from another one's checkpoint, and the trials of "
            "search() start from the trainer's weights. Use a scheduler that only stops trials, such as ASHAScheduler."
        )
    return dataclasses.replace(given, metric=metric, mode=mode, num_samples=n)


def _record(number: int, result: Any, metric: str) -> dict[str, Any]:
    metrics = result.metrics or {}
    is_complete = result.error is None and metrics.get(_COMPLETE, False)
    state = "complete" if is_complete else "pruned" if result.error is None and metric in metrics else "failed"
    return {"number": number, "state": state, "value": metrics.get(metric), "params": dict(result.config or {})}
