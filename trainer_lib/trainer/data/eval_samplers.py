"""The order in which generation reads a set: the longest samples first, so that a batch has samples of like length."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Sampler

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.foundation.lengths import length_of
from trainer_lib.trainer.data.train_samplers import fields_of

_LENGTHS: "WeakKeyDictionary[Any, tuple[str, list[int] | None]]" = WeakKeyDictionary()
Order = npt.NDArray[np.int64]


class LongestFirst(Sampler[int]):
    """The samples of a set by their lengths, the longest first.

    The batch that needs the most memory is the first one, and ranks get batches of like length at the same time.

    Args:
        lengths: The length of each sample.

    Attributes:
        order: The indices in the order in which they are read.

    Example:
        >>> list(LongestFirst([3, 9, 4]))
        [1, 2, 0]
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.order: Order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())

    def __len__(self) -> int:
        return len(self.order)


def order_of(loader: DataLoader[Any]) -> Order | None:
    """Return the order in which a loader reads its samples by length; `None` if it reads them in another way.

    Example:
        >>> order_of(DataLoader(range(2)))
    """
    return loader.sampler.order if isinstance(loader.sampler, LongestFirst) else None


def generation_lengths(dataset: Any, column: str) -> list[int] | None:
    """Return the number of tokens that generation reads and, by the labels, writes for each sample.

    They are read once for each dataset.

    Args:
        dataset: A map-style dataset.
        column: The field that holds the length, if there is one.

    Returns:
        `None` if samples have neither this field nor `input_ids`.

    Example:
        >>> generation_lengths([{"input_ids": [1, 2], "labels": [5]}, {"input_ids": [3], "labels": [6]}], "length")
        [3, 2]
    """
    size = length_of(dataset)
    try:
        known_column, lengths = _LENGTHS.get(dataset, ("", None))
    except TypeError:  # a dataset that cannot be a key
        return _read_lengths(dataset, column) if size else None
    if size and (known_column != column or len(lengths or ()) != size):
        lengths = _read_lengths(dataset, column)
        _LENGTHS[dataset] = column, lengths
    return lengths


def longest_first(dataset: Any, column: str, count: int | None = None) -> LongestFirst | None:
    """Return a sampler of the first `count` samples, the longest first; `None` if lengths are unknown or all equal."""
    lengths = generation_lengths(dataset, column)
    first = (lengths or [])[:count]
    return LongestFirst(first) if len({*first}) > 1 else None


def _read_lengths(dataset: Any, column: str) -> list[int] | None:
    with RandomStream(0):  # keeps training's random generators unchanged
        first = dataset[0]
        if not isinstance(first, Mapping) or not {column, "input_ids"} & set(first):
            return None
        if hasattr(first.get(column), "__index__"):  # else the field has another meaning
            return [int(length) for (length,) in fields_of(dataset, [column])]
        if "input_ids" not in first:
            return None
        # Labels as long as the inputs are in the same row as the prompt, which counts them already.
        has_answers = "labels" in first and _size(first["labels"]) != _size(first["input_ids"])
        names = ["input_ids", "labels"] if has_answers else ["input_ids"]
        return [sum(map(_size, values)) for values in fields_of(dataset, names)]


def _size(value: Any) -> int:
    """Return the length of a value; 0 for a number."""
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) else 0
