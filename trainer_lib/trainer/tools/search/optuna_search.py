"""Search with optuna: one trial after the other, each on all ranks."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trainer_lib.collectives.agreement import raise_on_all_ranks, run_on_main_process
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import require
from trainer_lib.trainer.tools.search.search_result import SearchResult, best_of
from trainer_lib.trainer.tools.search.search_space import Choices, Range, Space, check_names, read_space
from trainer_lib.trainer.tools.search.trial import Reporting, Trial
from trainer_lib.trainer.trainer_interface import TrainerInterface


def search_with_optuna(
    trainer: TrainerInterface, space: Space, n: int, metric: str, is_more: bool, study: Any
) -> SearchResult:
    """Search; see `Trainer.search`."""
    searching = _Searching(trainer, space, metric, is_more, study)
    searching.run(n)
    return searching.result()


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
        check_names(params)
        asked.set_user_attr("arguments", params)
        return asked.number, params

    def _train(self, proposed: tuple[int, dict[str, Any]], asked: Any) -> Trial:
        trial = Trial(self._trainer, *proposed, Reporting(self._metric, asked))
        trial.train(self._is_more)
        self._failure = trial.failure or self._failure
        return trial

    def result(self) -> SearchResult:
        """Return the result.

        Raises:
            ConfigurationError: If no trial completed.
        """
        records = self._group.broadcast_objects([self._records() if self._leads else None])[0]
        assert records is not None
        best = best_of(records, self._is_more, self._failure)
        return SearchResult(
            metric=self._metric,
            best_params=best["params"],
            best_value=best["value"],
            args=dataclasses.replace(self._trainer.args, **best["params"]),
            trials=records,
            study=self.study,
        )

    def _records(self) -> list[dict[str, Any]]:
        return [
            {
                "number": trial.number,
                "state": {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower()),
                "value": trial.value,
                "params": dict(trial.user_attrs.get("arguments", trial.params)),
            }
            for trial in self.study.trials
        ]


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
    directions = [direction.name.lower() for direction in given.directions]
    if directions != [direction]:
        raise ConfigurationError(
            f"The study's direction is {' and '.join(directions)}, but this search must {direction}. Give "
            f'optuna.create_study(direction="{direction}"), or greater_is_better=….'
        )
    return given


def _nothing() -> None:
    """Do what the processes do that do not ask."""


def _suggestions(space: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function that draws a trial's arguments from a mapping of descriptions."""
    described = read_space(space)
    return lambda trial: {name: _suggest(trial, name, description) for name, description in described.items()}


def _suggest(trial: Any, name: str, description: Choices | Range) -> Any:
    if isinstance(description, Choices):
        return trial.suggest_categorical(name, description.values)
    suggest = trial.suggest_int if description.is_whole else trial.suggest_float
    return suggest(name, description.low, description.high, log=description.is_log)
