"""The search for arguments, by the backend that proposes and starts trials."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.metric_names import greater_is_better_for
from trainer_lib.options.base import check_count
from trainer_lib.trainer.checks.before_fit import check_metric
from trainer_lib.trainer.evaluation.eval_sets import check_has_interval
from trainer_lib.trainer.tools.sandbox import check_can_sandbox
from trainer_lib.trainer.tools.search.optuna_search import search_with_optuna
from trainer_lib.trainer.tools.search.search_result import SearchResult
from trainer_lib.trainer.tools.search.search_space import Space
from trainer_lib.trainer.tools.search.trial import TOOL
from trainer_lib.trainer.trainer_interface import TrainerInterface

_BACKENDS = ("optuna", "ray")


def search(
    trainer: TrainerInterface,
    space: Space,
    n: int,
    metric: str | None,
    greater_is_better: bool | None,
    study: Any,
    backend: str,
    resources_per_trial: Mapping[str, float] | None,
) -> SearchResult:
    """Search; see `Trainer.search`."""
    check_count("n", n)
    if backend not in _BACKENDS:
        raise ConfigurationError(unknown("backend", backend, _BACKENDS))
    if resources_per_trial is not None and backend != "ray":
        raise ConfigurationError(
            f"resources_per_trial={dict(resources_per_trial)} is what a trial gets of a Ray cluster, but backend is "
            f'{backend!r}. Add backend="ray", or leave it out.'
        )
    check_can_sandbox(trainer, TOOL)
    _check(trainer, metric)
    if metric is None:
        metric, greater_is_better = trainer.parts.evaluation.best_metric, trainer.args.greater_is_better
    assert metric is not None  # as there is an evaluation set
    is_more = greater_is_better_for(metric, greater_is_better)
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    check_has_interval(trainer, full, f"search(metric={metric!r})")
    check_metric(trainer, full, f"search(metric={metric!r})")
    if backend == "ray":
        from trainer_lib.trainer.tools.search.ray_search import search_with_ray

        return search_with_ray(trainer, space, n, full, is_more, study, resources_per_trial)
    return search_with_optuna(trainer, space, n, full, is_more, study)


def _check(trainer: TrainerInterface, metric: str | None) -> None:
    if metric is not None and not isinstance(metric, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f'metric must be the name of a metric, such as "eval_loss" (got {shown(metric)}).')
    if trainer.parts.evaluation.interval is None:
        given = "" if metric is None else f"metric={metric!r}: "
        raise ConfigurationError(
            f"{given}{TOOL}() needs evaluations, but there are none. Give Trainer(eval_dataset=…), and leave out "
            'eval_every="never".'
        )
    for name, given in (("optimizer", trainer.optimizer), ("scheduler", trainer.scheduler)):
        for candidate in given.values() if isinstance(given, Mapping) else [given]:
            if isinstance(candidate, Optimizer) or (hasattr(candidate, "step") and not isinstance(candidate, type)):
                raise ConfigurationError(
                    f"{TOOL}() makes a new {name} for each trial, but {name}=… is an existing "
                    f"{type(candidate).__name__}. Give a function that makes it, or TrainingArguments(…)."
                )
