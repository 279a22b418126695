"""Hyperparameter search with optuna: trials that train from the same weights with other arguments."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.optim import Optimizer

from trainer_lib.collectives.agreement import raise_on_all_ranks, run_on_main_process
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import (
    ConfigurationError,
    NoExecutableBatchSizeError,
    NonFiniteError,
    TrainerLibError,
    did_you_mean,
)
from trainer_lib.foundation.imports import require
from trainer_lib.foundation.metric_names import greater_is_better_for, read_metric
from trainer_lib.memory.executable_batch_size import free_memory_of
from trainer_lib.options.base import check_count
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.tools.sandbox import check_can_sandbox, copy_callbacks, sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "search"
_FOLDER = "search"  # in output_dir, so that resume does not find the trials
_LOG = "log"
# Arguments that all trials share, and why.
_OF_ALL = {
    **dict.fromkeys(("mixed_precision", "compile", "fsdp", "parallelism", "ddp", "use_cpu"), "sets up the accelerator"),
    **dict.fromkeys(("gradient_checkpointing", "sync_batchnorm", "parameter_groups"), "changes the model permanently"),
    **dict.fromkeys(("seed", "data_seed"), "seeds the accelerator's loaders"),
    **dict.fromkeys(("output_dir", "run_name", "resume", "dry_run"), "is set by the search"),
    **dict.fromkeys(("metric_for_best", "greater_is_better"), "is the objective of the search"),
}
_PLAIN = (bool, int, float, str, type(None))

Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search, the same on all ranks.

    Attributes:
        metric: The metric that the search optimizes.
        best_params: The searched arguments of the best trial.
        best_value: The metric of its last evaluation.
        args: The trainer's arguments with those of the best trial.
        trials: For each trial its number, its state ("complete", "pruned" or "failed"), value and params.
        study: The optuna study, on the main process.
    """

    metric: str
    best_params: dict[str, Any]
    best_value: float
    args: TrainingArguments
    trials: list[dict[str, Any]]
    study: Any = field(default=None, repr=False)

    def to_pandas(self) -> Any:
        """Return the trials as a data frame, with a column for each argument."""
        pandas = require("pandas", "plot")
        rows = [
            {**{name: trial[name] for name in ("number", "state", "value")}, **trial["params"]} for trial in self.trials
        ]
        return pandas.DataFrame(rows).set_index("number")

    def __str__(self) -> str:
        """Return the best trial, and the counts of trials by state."""
        params = ", ".join(f"{name}={_short(value)}" for name, value in self.best_params.items())
        states = [trial["state"] for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{self.metric} {self.best_value:.6g} with {params} ({counts})"


def search(
    trainer: TrainerInterface, space: Space, n: int, metric: str | None, greater_is_better: bool | None, study: Any
) -> SearchResult:
    """Search; see `Trainer.search`."""
    check_count("n", n)
    check_can_sandbox(trainer, _TOOL)
    _check(trainer, metric)
    if metric is None:
        metric, greater_is_better = trainer.parts.evaluation.best_metric, trainer.args.greater_is_better
    assert metric is not None  # as there is an evaluation set
    is_more = greater_is_better_for(metric, greater_is_better)
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    searching = _Searching(trainer, space, full, is_more, study)
    searching.run(n)
    return searching.result()


# -- the study --------------------------------------------------------------------------------------------------------


class _FailedTrialError(Exception):
    """A trial has failed, and the search continues."""


class _Searching:
    """The search: the main process has the optuna study, and broadcasts each trial's arguments to the other ranks.

    Args:
        trainer: The trainer.
        space: The search space.
        metric: The metric to optimize.
        is_more: Whether higher is better.
        study: An existing study; `None`: a new one.
    """

    def __init__(self, trainer: TrainerInterface, space: Space, metric: str, is_more: bool, study: Any) -> None:
        self._trainer, self._group = trainer, trainer.accelerator.group
        self._metric, self._is_more = metric, is_more
        self._leads = self._group.rank == 0
        self._suggest = space if callable(space) else _suggestions(space)
        self._failure: str | None = None
        with raise_on_all_ranks(self._group, "search"):
            self.study: Any = _study(trainer, is_more, study) if self._leads else None

    def run(self, n: int) -> None:
        """Train `n` trials, each on all ranks."""
        if self._leads:
            self.study.optimize(self._objective, n_trials=n, catch=(_FailedTrialError,))
            self._agree(_nothing)  # that there are no more
            return
        while (proposed := self._agree(_nothing)) is not None:
            self._train(proposed, None)

    def _objective(self, asked: Any) -> float:
        """Train with the arguments that optuna proposes, and return the metric."""
        trial = self._train(self._agree(partial(self._proposed, asked)), asked)
        if trial.is_interrupted:
            self.study.stop()
        if trial.failure is not None:
            raise _FailedTrialError(trial.failure)
        if trial.is_pruned or trial.value is None:
            raise _optuna().TrialPruned
        return trial.value

    def _agree(self, propose: Callable[[], Any]) -> Any:
        """Return what the main process proposes, on all processes."""
        return run_on_main_process(self._group, "search", propose)

    def _proposed(self, asked: Any) -> tuple[int, dict[str, Any]]:
        """Return the number and the arguments of a trial."""
        given = self._suggest(asked)
        if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"space(trial) returned a {type(given).__name__}. Return the arguments by name: "
                '{"learning_rate": trial.suggest_float(…)}.'
            )
        params = dict(asked.params if given is None else given)
        _check_names(params)
        asked.set_user_attr("arguments", params)
        return asked.number, params

    def _train(self, proposed: tuple[int, dict[str, Any]], asked: Any) -> "_Trial":
        trial = _Trial(self._trainer, *proposed, _Reporting(self._metric, asked))
        trial.train(self._is_more)
        self._failure = trial.failure or self._failure
        return trial

    def result(self) -> SearchResult:
        """Return the result.

        Raises:
            ConfigurationError: If no trial completed.
        """
        records, best = self._group.broadcast_objects([self._found() if self._leads else None])[0]
        if best is None:
            reason = f" The last failure: {self._failure}" if self._failure else ""
            raise ConfigurationError(f"None of the {len(records)} trials completed with a value.{reason}")
        return SearchResult(
            metric=self._metric,
            best_params=best["params"],
            best_value=best["value"],
            args=dataclasses.replace(self._trainer.args, **best["params"]),
            trials=records,
            study=self.study,
        )

    def _found(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        records = [
            {
                "number": trial.number,
                "state": {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower()),
                "value": trial.value,
                "params": dict(trial.user_attrs.get("arguments", trial.params)),
            }
            for trial in self.study.trials
        ]
        is_any = any(record["state"] == "complete" for record in records)
        return records, records[self.study.best_trial.number] if is_any else None


def _optuna() -> Any:
    # optuna keeps an ImportError from its own import, whose traceback holds the frames of the first importer. In a
    # thread these frames hold neither the trainer nor its model.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(require, "optuna", "search").result()


def _study(trainer: TrainerInterface, is_more: bool, given: Any) -> Any:
    optuna = _optuna()
    direction = "maximize" if is_more else "minimize"
    if given is None:
        return optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=trainer.args.seed))
    there = [direction.name.lower() for direction in given.directions]
    if there != [direction]:
        raise ConfigurationError(
            f"The study's direction is {' and '.join(there)}, but this search must {direction}. Give "
            f'optuna.create_study(direction="{direction}"), or greater_is_better=….'
        )
    return given


def _nothing() -> None:
    """Do what the processes do that do not ask."""


# -- the search space --------------------------------------------------------------------------------------------------


def _suggestions(space: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function that draws a trial's arguments from a mapping of descriptions."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigurationError(
            f"space={space!r} must be a dict by the names of arguments, such as "
            '{"learning_rate": (1e-5, 1e-2, "log")}, or a function of a trial that returns arguments by name.'
        )
    _check_names(space)
    made = {name: _suggestion(name, description) for name, description in space.items()}
    return lambda trial: {name: suggest(trial) for name, suggest in made.items()}


def _suggestion(name: str, description: Any) -> Callable[[Any], Any]:
    """Return a function that draws one argument: from a list of choices, or a range."""
    if isinstance(description, list) and description and all(isinstance(choice, _PLAIN) for choice in description):
        return lambda trial: trial.suggest_categorical(name, description)
    if (
        isinstance(description, tuple)
        and len(description) in (2, 3)
        and (len(description) == 2 or description[2] == _LOG)
    ):
        low, high, is_log = description[0], description[1], len(description) == 3
        is_range = _is_number(low) and _is_number(high) and low < high and (low > 0 or not is_log)
        if is_range and isinstance(low, int) and isinstance(high, int):
            return lambda trial: trial.suggest_int(name, low, high, log=is_log)
        if is_range:
            return lambda trial: trial.suggest_float(name, low, high, log=is_log)
    raise ConfigurationError(
        f"space[{name!r}]={description!r} must be a list of numbers or strings to choose from, a range (low, high) (of "
        'integers if both are), or (low, high, "log") with low above 0. For anything else give a function of a trial.'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_names(params: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    for name in params:
        if name not in known:
            raise ConfigurationError(
                f"space has {name!r}, which is not an argument of TrainingArguments.{did_you_mean(name, known)}"
            )
        if name in _OF_ALL:
            raise ConfigurationError(
                f"space has {name!r}, which {_OF_ALL[name]} and must be the same for all trials. Remove it."
            )


# -- a trial -----------------------------------------------------------------------------------------------------------


class _Trial:
    """One trial.

    Args:
        trainer: The trainer.
        number: The number of the trial.
        params: The arguments to train with.
        reporting: The callback that reports evaluations to optuna.

    Attributes:
        value: The metric of its last evaluation; `None` before the first.
        failure: Why it failed; `None` if it did not.
        is_interrupted: Whether a signal or a deadline ended it.
    """

    def __init__(
        self, trainer: TrainerInterface, number: int, params: Mapping[str, Any], reporting: "_Reporting"
    ) -> None:
        self._trainer, self._number, self._params, self._reporting = trainer, number, params, reporting
        self.value: float | None = None
        self.failure: str | None = None
        self.is_interrupted = False

    @property
    def is_pruned(self) -> bool:
        """Whether optuna pruned it, known on the main process."""
        return self._reporting.is_pruned

    def train(self, is_more: bool) -> None:
        """Train from the trainer's current state, and restore that state."""
        trainer, root = self._trainer, self._trainer.args.output_folder
        of_search = {
            "output_dir": None if root is None else str(root / _FOLDER),
            "run_name": f"trial-{self._number}",
            "resume": "never",
            "metric_for_best": self._reporting.metric,
            "greater_is_better": is_more,
        }
        args = dataclasses.replace(trainer.args, **{**self._params, **of_search})
        kept = [callback for callback in trainer.events if not (callback.is_display or callback.writes_history)]
        callbacks = defaults.callbacks(args, copy_callbacks(trainer, _TOOL, kept))
        listening = [callback for callback in callbacks if not callback.is_display]
        try:
            with sandbox(trainer, _TOOL, args, [*listening, self._reporting]):
                trainer.fit()
                self._note(trainer.run)
        except Exception as error:
            if not self._is_survived(error):
                raise
            self.failure = f"{type(error).__name__}: {error}"
            free_memory_of(error)

    def _note(self, run: Run) -> None:
        self.is_interrupted = run.state.status == "interrupted"
        if self.is_interrupted:
            self.failure = f"interrupted: {run.state.reason}"
            return
        self.value = self._reporting.read(run.metrics)
        if not math.isfinite(self.value) and not self.is_pruned:
            self.failure = f"{self._reporting.metric} is {self.value}"

    def _is_survived(self, error: Exception) -> bool:
        """Whether the search continues: not after a wrong setup, nor if the other ranks may wait for this one."""
        if isinstance(error, NonFiniteError):  # raised on all ranks together
            return True
        is_of_trial = isinstance(error, NoExecutableBatchSizeError) or not isinstance(error, TrainerLibError)
        return is_of_trial and self._trainer.accelerator.num_processes == 1


class _Reporting(Callback):
    """Reports each evaluation to optuna, and ends the trial if optuna prunes it."""

    order = 1000  # after callbacks that add metrics

    def __init__(self, metric: str, asked: Any) -> None:
        self.metric, self._asked = metric, asked  # optuna's trial, on the main process only
        self.is_pruned = False

    def read(self, metrics: Mapping[str, float]) -> float:
        """Return the metric that the search optimizes."""
        return read_metric(self.metric, metrics, f"search(metric={self.metric!r})")

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.leaves_out(self.metric):
            return
        value = self.read(metrics)
        if self._asked is None or run.state.status != "running":
            return
        self._asked.report(value, run.state.step)
        if self._asked.should_prune():
            self.is_pruned = run.control.stop = True
            run.control.reason = f"the trial was pruned at {self.metric} = {value:.6g}"


def _check(trainer: TrainerInterface, metric: str | None) -> None:
    if trainer.parts.evaluation.interval is None:
        given = "" if metric is None else f"metric={metric!r}: "
        raise ConfigurationError(
            f"{given}{_TOOL}() needs evaluations, but there are none. Give Trainer(eval_dataset=…), and leave out "
            'eval_every="never".'
        )
    for name, given in (("optimizer", trainer.optimizer), ("scheduler", trainer.scheduler)):
        for candidate in given.values() if isinstance(given, Mapping) else [given]:
            if isinstance(candidate, Optimizer) or (hasattr(candidate, "step") and not isinstance(candidate, type)):
                raise ConfigurationError(
                    f"{_TOOL}() makes a new {name} for each trial, but {name}=… is an existing "
                    f"{type(candidate).__name__}. Give a function that makes it, or TrainingArguments(…)."
                )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
