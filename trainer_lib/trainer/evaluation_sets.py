"""The sets to evaluate on, by name: what a dict given as `eval_dataset` means."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data_loader.probe import samples_at
from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


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
