"""Buffers that join the rows of many batches in memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.tensors.pytree import map_leaves, map_tensors, named_leaves
from trainer_lib.trainer.data.batch_rows import as_array, holds_rows_of

if TYPE_CHECKING:
    from trainer_lib.data_loader.order.permutation import Positions

PADDING = IGNORE_INDEX  # as Hugging Face pads predictions and labels
Rows = np.ndarray[Any, Any] | list[Any] | None


class Structure:
    """The common structure of a set's batches: containers, with rows in their leaves.

    Args:
        what: The name of the rows, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.names: list[str] | None = None
        self._is_one_array = False
        self._first: Any = None

    def rows_of(self, batch: Any, total: int | None) -> list[Rows]:
        """Return the rows in the leaves of a batch: arrays, lists, or `None`.

        Args:
            batch: The batch.
            total: The number of its samples, which tells lists with one item per sample from lists of columns.

        Raises:
            ConfigurationError: If its structure differs from the first batch's.
        """
        if type(batch) is Tensor and self._is_one_array:  # the most frequent case
            return [_rows(batch)]
        for is_leaf in (_is_leaf(batch, total), _is_leaf(batch, total, unclear=True), holds_rows):
            leaves = list(named_leaves(batch, is_leaf=is_leaf))
            names, rows = [name for name, _ in leaves], [_rows(leaf) for _, leaf in leaves]
            if self.names in (None, names):  # else a list of this batch can be read both ways
                break
        if self.names is None:
            # Only types: the batch itself would keep its tensors in memory.
            self.names, self._first = names, map_leaves(type, batch, is_leaf=is_leaf)
            self._kinds = [type(leaf) for leaf in rows]
            self._is_one_array = type(batch) is Tensor
        elif names != self.names or self._kinds != [type(leaf) for leaf in rows]:
            raise ConfigurationError(
                f"The {self._what} of a batch are {_described(names, rows)}, and those of an earlier one were "
                f"{_described(self.names, self._kinds)}. Return the same structure for each batch."
            )
        return rows

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Return the containers, with these leaves."""
        if self.names is None:
            return None
        remaining = iter(leaves)
        return map_leaves(lambda leaf: next(remaining), self._first)


class RowBuffers:
    """Collects the rows of many batches, and joins them once.

    Args:
        what: The name of the rows, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._structure = Structure(what)
        self._batches: list[list[Rows]] = []

    def add(self, batch: Any, total: int | None) -> None:
        """Add a batch.

        Args:
            batch: The batch.
            total: The number of its samples.
        """
        self._batches.append(self._structure.rows_of(batch, total))

    def joined(self, padding: int = PADDING, order: "Positions | None" = None) -> Any:
        """Return all rows and empty the buffers.

        Args:
            padding: What arrays of different sizes are padded with.
            order: The samples in the order in which they were read; `None`: in the order of the data.
        """
        parts, self._batches = [list(column) for column in zip(*self._batches, strict=True)], []
        return self._structure.filled([joined(column, self._what, padding, order) for column in parts])


def joined(parts: list[Any], what: str, padding: int = PADDING, order: "Positions | None" = None) -> Rows:
    """Return the rows of all parts in the order of the data, and empty the list of parts.

    Raises:
        ConfigurationError: If they have different numbers of dimensions, or not as many rows as samples were read.
    """
    if parts[0] is None:
        return None
    if isinstance(parts[0], list):
        return _texts([row for part in parts for row in part], what, order)
    shape = common_shape([part.shape for part in parts], what)
    is_ragged = any(part.shape[1:] != shape[1:] for part in parts)
    if order is None and not is_ragged:
        return np.concatenate(parts)
    dtype = np.result_type(*{part.dtype for part in parts})
    whole = np.full(shape, padding, padded_type(dtype)) if is_ragged else np.empty(shape, dtype)
    places = None if order is None else places_of(order, len(whole), what)
    row = 0
    for index, part in enumerate(parts):
        fill(whole, row, part, places)
        row += len(part)
        parts[index] = None  # so that its memory is free
    return whole


def places_of(order: "Positions", rows: int, what: str) -> "Positions":
    """Return where rows that were read in an order belong; there may be several rows a sample.

    Raises:
        ConfigurationError: If there are not as many rows for each sample.

    Example:
        >>> places_of(np.array([1, 0]), 4, "predictions").tolist()
        [2, 3, 0, 1]
    """
    if rows % len(order):
        raise ConfigurationError(
            f"evaluation_step returned {rows} rows of {what} for {len(order)} samples that were read in the order of "
            "their lengths, so they cannot be put back into the order of the data. Return as many rows for each "
            "sample, or give a DataLoader, which keeps its order."
        )
    per_sample = rows // len(order)
    return (order[:, None] * per_sample + np.arange(per_sample)).reshape(-1)


def common_shape(shapes: Sequence[tuple[int, ...]], what: str) -> tuple[int, ...]:
    """Return the shape that has room for rows of all these."""
    if len({len(shape) for shape in shapes}) > 1:
        raise ConfigurationError(
            f"The {what} of batches have different numbers of dimensions: {sorted(set(shapes))[:4]}. Return the same "
            "number for each batch, with one row per sample."
        )
    return sum(shape[0] for shape in shapes), *(max(sizes) for sizes in zip(*(s[1:] for s in shapes), strict=True))


def padded_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type that can hold the padding too."""
    return np.dtype(np.int64) if dtype.kind in "bu" else dtype


def fill(whole: np.ndarray[Any, Any], row: int, part: np.ndarray[Any, Any], places: "Positions | None" = None) -> None:
    """Write rows into an array with room for more, from `row` on, or where `places` has these rows."""
    rows = slice(row, row + len(part))
    whole[(rows if places is None else places[rows], *(slice(size) for size in part.shape[1:]))] = part


def _texts(rows: list[Any], what: str, order: "Positions | None") -> list[Any]:
    if order is None:
        return rows
    return [rows[index] for index in np.argsort(places_of(order, len(rows), what))]


def _is_leaf(batch: Any, total: int | None, unclear: bool = False) -> Callable[[Any], bool]:
    """Return a function that tells which containers hold rows; a tuple of tensors holds what a model returned."""
    holds_row = holds_rows_of({"rows": batch}, total, unclear)
    return lambda tree: holds_row(tree) and not (type(tree) is tuple and any(isinstance(item, Tensor) for item in tree))


def _rows(leaf: Any) -> Rows:
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return np.atleast_1d(as_array(leaf))
    if isinstance(leaf, np.ndarray):
        return np.atleast_1d(leaf)
    return map_tensors(as_array, list(leaf)) if isinstance(leaf, (list, tuple)) else [leaf]


def _described(names: Sequence[str], rows: Sequence[Any]) -> str:
    kinds = [leaf if isinstance(leaf, type) else type(leaf) for leaf in rows]
    return ", ".join(f"{name or 'it'}: {kind.__name__}" for name, kind in zip(names, kinds, strict=True)) or "nothing"
