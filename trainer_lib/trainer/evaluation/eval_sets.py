"""The sets to evaluate on, by name: what a dict given as `eval_dataset` means."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data_loader.readers.probe import samples_at
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.metric_names import sets_of_metric

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


class ChosenSets(dict[str, Any]):
    """Some of the sets by name, which `named_sets` returns as they are: no dict of columns."""


def sets_at_intervals(trainer: "Trainer") -> list[str]:
    """Return the names of the sets that are evaluated at intervals: all, or those that `eval_every` gives one."""
    names, intervals = list(named_sets(trainer, trainer.eval_dataset)), trainer.args.eval_intervals
    if trainer.args.eval_interval is None:
        return []
    return [name for name in names if not intervals or intervals.get(name) is not None]


def metrics_over_sets(trainer: "Trainer") -> list[str]:
    """Return the metrics to take the mean of over the sets; none in an evaluation that leaves out some of them."""
    named = (trainer.args.metric_for_best or "").removeprefix("eval_")
    is_wanted = named.startswith("mean_") and all(trainer.run.eval_sets.values())
    return [named.removeprefix("mean_")] if is_wanted else []


def check_intervals(trainer: "Trainer") -> None:
    """Check that `eval_every`, where it names sets, names those that there are.

    Raises:
        ConfigurationError: If it does not.
    """
    given, names = trainer.args.eval_every, list(named_sets(trainer, trainer.eval_dataset))
    if not isinstance(given, Mapping):
        return
    told = f"eval_every={shown(given)}"
    if names == [""]:
        first = next(iter(given))
        raise ConfigurationError(
            f"{told} has intervals by the names of sets, and eval_dataset is one set without a name. Give one "
            f"interval, eval_every={given[first]!r}, or name the set: eval_dataset={{{first!r}: …}}."
        )
    if unknown := [name for name in given if name not in names]:
        raise ConfigurationError(
            f"{told} names {', '.join(map(repr, unknown))}, and the sets are {', '.join(map(repr, names))}."
            f"{did_you_mean(unknown[0], names)}"
        )
    if missing := [name for name in names if name not in given]:
        fixed = shown({**given, **dict.fromkeys(missing, "never")})
        raise ConfigurationError(
            f"{told} has no interval for {', '.join(map(repr, missing))}. Give each set one; to leave sets out of the "
            f"evaluations at intervals: eval_every={fixed}."
        )
    try:
        inspect.signature(trainer.evaluate).bind({})
    except TypeError:
        raise ConfigurationError(
            f"{told} evaluates some of the sets, which {type(trainer).__name__}.evaluate does not take. Give it a "
            "parameter for them: def evaluate(self, dataset=None)."
        ) from None


def check_has_interval(trainer: "Trainer", metric: str, told_as: str) -> None:
    """Check that a metric that something goes by is of sets with intervals.

    Raises:
        ConfigurationError: If one of its sets is never evaluated at an interval.
    """
    intervals = trainer.args.eval_intervals
    for name in sets_of_metric(metric, list(named_sets(trainer, trainer.eval_dataset))):
        if name in intervals and intervals[name] is None:
            raise ConfigurationError(
                f'{told_as} needs evaluations of the set {name!r}, and eval_every[{name!r}]="never" makes none. Give '
                'it an interval, such as "1 epoch", or go by a metric of another set.'
            )


def named_sets(trainer: "Trainer", given: Any, told_as: str = "eval_dataset") -> dict[str, Any]:
    """Return datasets by name; a single one has none.

    A dict of arrays is one set by columns, or several sets of rows: the training data tells which.

    Args:
        trainer: Whose training data and model tell what samples look like.
        given: The data: one dataset, or several by name.
        told_as: What they were given as.

    Raises:
        ConfigurationError: If there is none, one without a name, or both readings are possible.

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
        raise ConfigurationError(f"{told_as} is an empty dict. Give a dataset, or datasets by name.")
    if _is_one_set(trainer, sets, told_as):
        return {"": given}
    for name in sets:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{told_as} names a set {name!r}. Name it by a text, which its metrics are called by."
            )
    return dict(sets)


def _is_one_set(trainer: "Trainer", given: Mapping[Any, Any], told_as: str) -> bool:
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
    taken = {} if columns or not isinstance(trainer.model, nn.Module) else _parameters(trainer.model)
    if isinstance(_data(trainer.train_dataset), (Tensor, np.ndarray)):  # of rows without names, as these are
        if not taken.keys() >= given.keys():
            return False
    elif not taken.keys().isdisjoint(given):
        return True
    names = " and ".join(map(repr, given))
    raise ConfigurationError(
        f"{told_as} is a dict of arrays, {names}: either one set with these columns, or {len(given)} sets of these "
        f"names. The training data {_described(columns)}, which does not tell. For one set by columns name the set: "
        f'{told_as}={{"test": {{…}}}}; for several give each in the form of the training data, such as '
        f"{{{next(iter(given))!r}: TensorDataset(inputs, labels), …}}."
    )


def _columns(train_dataset: Any) -> set[Any] | None:
    """Return the names of what training samples consist of: none of rows and tuples, `None` where it is not known."""
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
        return inspect.signature(type(model).forward).parameters  # that of an object may be wrapped
    except (TypeError, ValueError):
        return {}


def _described(columns: set[Any]) -> str:
    if not columns:
        return "has samples without names"
    return f"has the columns {', '.join(sorted(map(repr, columns)))}"
