"""The sets to evaluate on, by name: what a dict given as `eval_dataset` means."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.events import Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.metric_names import sets_of_metric
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments


class EvaluatedTrainer(Protocol):
    """What a trainer says about its evaluation sets."""

    model: nn.Module | Mapping[str, nn.Module]
    args: TrainingArguments
    run: Run
    train_dataset: Any
    eval_dataset: Any
    metrics: Any
    compute_metrics: Callable[..., Mapping[str, float]] | None

    @property
    def evaluate(self) -> Callable[..., dict[str, float]]:
        """Evaluates a dataset, or several by name."""
        ...


class ChosenSets(dict[str, Any]):
    """Some of the sets by name, which `named_sets` returns unchanged: this dict is never one set of columns."""


def sets_at_intervals(trainer: EvaluatedTrainer) -> list[str]:
    """Return the names of the sets that are evaluated at intervals: all, or those with an interval in `eval_every`."""
    names, intervals = list(named_sets(trainer, trainer.eval_dataset)), trainer.args.eval_intervals
    if trainer.args.eval_interval is None:
        return []
    return [name for name in names if not intervals or intervals.get(name) is not None]


def metrics_over_sets(trainer: EvaluatedTrainer) -> list[str]:
    """Return the metrics to average over the sets; none in an evaluation of only some of the sets."""
    name = (trainer.args.metric_for_best or "").removeprefix("eval_")
    needs_mean = name.startswith("mean_") and all(trainer.run.eval_sets.values())
    return [name.removeprefix("mean_")] if needs_mean else []


def check_intervals(trainer: EvaluatedTrainer) -> None:
    """Check that `eval_every`, if it is a dict, names all evaluation sets and no others.

    Raises:
        ConfigurationError: If it does not.
    """
    intervals, names = trainer.args.eval_every, list(named_sets(trainer, trainer.eval_dataset))
    if not isinstance(intervals, Mapping):
        return
    option = f"eval_every={shown(intervals)}"
    if names == [""]:
        first = next(iter(intervals))
        raise ConfigurationError(
            f"{option} has intervals by the names of sets, but eval_dataset is one set without a name. Give one "
            f"interval, eval_every={intervals[first]!r}, or name the set: eval_dataset={{{first!r}: …}}."
        )
    if unknown := [name for name in intervals if name not in names]:
        raise ConfigurationError(
            f"{option} names {', '.join(map(repr, unknown))}, but the sets are {', '.join(map(repr, names))}."
            f"{did_you_mean(unknown[0], names)}"
        )
    if missing := [name for name in names if name not in intervals]:
        fixed = shown({**intervals, **dict.fromkeys(missing, "never")})
        raise ConfigurationError(
            f"{option} has no interval for {', '.join(map(repr, missing))}. Give each set an interval; to leave sets "
            f"out of the evaluations at intervals, give eval_every={fixed}."
        )
    try:
        inspect.signature(trainer.evaluate).bind({})
    except TypeError:
        raise ConfigurationError(
            f"{option} evaluates some of the sets, but {type(trainer).__name__}.evaluate has no parameter for them. "
            "Add it: def evaluate(self, dataset=None)."
        ) from None


def check_has_interval(trainer: EvaluatedTrainer, metric: str, option: str) -> None:
    """Check that the sets of a metric are evaluated at intervals.

    Raises:
        ConfigurationError: If one of its sets never is.
    """
    intervals = trainer.args.eval_intervals
    for name in sets_of_metric(metric, list(named_sets(trainer, trainer.eval_dataset))):
        if name in intervals and intervals[name] is None:
            raise ConfigurationError(
                f'{option} needs evaluations of the set {name!r}, but eval_every[{name!r}]="never" disables them. Give '
                'it an interval, such as "1 epoch", or choose a metric of another set.'
            )


def named_sets(trainer: EvaluatedTrainer, given: Any, option: str = "eval_dataset") -> dict[str, Any]:
    """Return datasets by name; a single one has the name "".

    A dict of arrays is one set of columns, or several sets of rows. The training data decides which.

    Args:
        trainer: The trainer, whose training data and model show what samples look like.
        given: The data: one dataset, or several by name.
        option: What error messages call the data.

    Raises:
        ConfigurationError: If a dict is empty, a name is not a string, or a dict of arrays is ambiguous.

    Example:
        >>> import torch
        >>> from trainer_lib import Trainer
        >>> rows = torch.ones(4, 2)
        >>> list(named_sets(Trainer(torch.nn.Linear(2, 2), train_dataset=rows), {"dev": rows, "test": rows}))
        ['dev', 'test']
        >>> trainer = Trainer(torch.nn.Linear(2, 2), train_dataset={"input": rows, "labels": rows})
        >>> list(named_sets(trainer, {"input": rows, "labels": rows}))
        ['']
    """
    if not isinstance(given, Mapping):
        return {"": given}
    if isinstance(given, ChosenSets):
        return dict(given)
    sets = cast("Mapping[Any, Any]", given)
    if not sets:
        raise ConfigurationError(f"{option} is an empty dict. Give a dataset, or datasets by name.")
    if _is_one_set(trainer, sets, option):
        return {"": given}
    for name in sets:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{option} names a set {name!r}. Give the name as a string: it becomes part of the metrics' names."
            )
    return dict(sets)


def _is_one_set(trainer: EvaluatedTrainer, given: Mapping[Any, Any], option: str) -> bool:
    if not all(isinstance(value, (Tensor, np.ndarray, list, tuple)) for value in given.values()):
        return False
    has_arrays = all(isinstance(value, (Tensor, np.ndarray)) for value in given.values())
    columns = _columns(trainer.train_dataset)
    if columns is None:
        return has_arrays
    if not columns.isdisjoint(given):
        return True
    if not has_arrays:
        return False
    accepted = {} if columns or not isinstance(trainer.model, nn.Module) else _parameters(trainer.model)
    if isinstance(_data(trainer.train_dataset), (Tensor, np.ndarray)):  # rows without names, like the arrays given
        if not accepted.keys() >= given.keys():
            return False
    elif not accepted.keys().isdisjoint(given):
        return True
    names = " and ".join(map(repr, given))
    raise ConfigurationError(
        f"{option} is a dict of arrays, {names}: either one set with these columns, or {len(given)} sets with these "
        f"names. The training data {_described(columns)}, which does not decide it. For one set of columns, name the "
        f'set: {option}={{"test": {{…}}}}; for several, give each in the form of the training data, such as '
        f"{{{next(iter(given))!r}: TensorDataset(inputs, labels), …}}."
    )


def _columns(train_dataset: Any) -> set[Any] | None:
    """Return the column names of training samples: none for rows and tuples, `None` if they are not known."""
    from trainer_lib.data_loader.readers.probe import samples_at

    data = _data(train_dataset)
    if data is None or isinstance(data, IterableDataset):
        return None
    if isinstance(data, Mapping):
        return set(cast("Mapping[Any, Any]", data))
    if isinstance(names := getattr(data, "column_names", None), list):  # of Hugging Face
        return set(cast("list[Any]", names))
    if isinstance(data, (Tensor, np.ndarray, tuple)):
        return set()
    samples = samples_at(data, [0])
    if not samples:
        return None
    return set(cast("Mapping[Any, Any]", samples[0])) if isinstance(samples[0], Mapping) else set()


def _data(train_dataset: Any) -> Any:
    return train_dataset.dataset if isinstance(train_dataset, DataLoader) else train_dataset


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    try:
        return inspect.signature(type(model).forward).parameters  # the object's own forward may be wrapped
    except (TypeError, ValueError, AttributeError):  # a scripted model's class has no forward
        return {}


def _described(columns: set[Any]) -> str:
    if not columns:
        return "has samples without names"
    return f"has the columns {', '.join(sorted(map(repr, columns)))}"
