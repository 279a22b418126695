"""Reads samples of a dataset without changing generators, counters or open files of the training."""

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer_lib.data_loader.order.data_rng import RandomStream, is_generator

_SEED = 20_240_229  # the same on all ranks


def samples_at(dataset: Any, keys: Sequence[Any]) -> list[Any] | None:
    """Return samples of a map-style dataset; `None` if they cannot be read this way.

    Generators get one fixed seed, so that a dataset that draws random numbers draws the same on all ranks.

    Example:
        >>> samples_at([5, 6, 7], [2, 0])
        [7, 5]
    """
    try:
        with RandomStream(_SEED):
            twin = _twin(dataset)
            fetch = getattr(twin, "__getitems__", None)
            return [twin[key] if fetch is None else fetch([key])[0] for key in keys]
    except Exception:  # noqa: BLE001 - training raises it too, with a better message
        return None


def samples_of_stream(dataset: Any, count: int) -> list[Any] | None:
    """Return the first samples of an iterable dataset; `None` if that would consume them, or they cannot be read."""
    try:
        with RandomStream(_SEED):
            twin = _twin(dataset)
            iterator = iter(twin)
            if iterator is twin or iterator is iter(twin):
                return None
            return list(islice(iterator, count))
    except Exception:  # noqa: BLE001
        return None


def _twin(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, and of the datasets inside it, with copies of their generators."""
    if isinstance(dataset, (list, tuple, dict)):
        return dataset  # pyright: ignore[reportUnknownVariableType]
    if hasattr(type(dataset), "__del__"):
        raise TypeError("Deleting the copy may close what the dataset has open.")
    twin = copy.copy(dataset)
    attributes: dict[str, Any] = getattr(twin, "__dict__", {})
    for name, value in list(attributes.items()):
        if isinstance(value, torch.Generator):
            attributes[name] = value.clone_state()
        elif is_generator(value):
            attributes[name] = copy.deepcopy(value)
        elif isinstance(value, Dataset):
            attributes[name] = _twin(value)
        elif isinstance(value, list) and value and all(isinstance(part, Dataset) for part in value):  # pyright: ignore[reportUnknownVariableType]
            attributes[name] = [_twin(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    return twin
