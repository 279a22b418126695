"""This file is the rows of a batch: how many it has, and taking some of them."""

from typing import Any

import numpy as np
from torch import Tensor

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.data_loader.order.rank_rounds import TAKING_PART
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.pytree import leaves, map_leaves, named_leaves
from trainer_lib.state.gradient_state import Rows


def count_rows(batch: Any) -> int | None:
    """Return how many rows a batch has: those of its first tensor, array or list; `None` where there is none.

    Example:
        >>> count_rows({"texts": ["a cat", "a dog"], "scale": 2.0})
        2
    """
    return next((len(leaf) for leaf in leaves(batch, is_leaf=holds_rows) if _has_rows(leaf)), None)


def take_rows(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Return the rows of a batch from `start` to `stop`: of its tensors, its arrays, and its lists of other values.

    What has no rows or a single one, as a mask for all, stays as it is.

    Args:
        batch: The batch.
        start: The first row.
        stop: The row after the last.
        total: How many rows it has, if that is known.

    Raises:
        ConfigurationError: If something in it has another number of rows.

    Example:
        >>> take_rows({"texts": ["a cat", "a dog", "a cow"], "scale": 2.0}, 0, 2)
        {'texts': ['a cat', 'a dog'], 'scale': 2.0}
    """
    total = total or count_rows(batch)
    for name, leaf in named_leaves(batch, is_leaf=holds_rows):
        if _has_rows(leaf) and len(leaf) not in (1, total):
            raise ConfigurationError(
                f"This batch has {total} rows, and {len(leaf)} in {name or 'it'}: which of them belong together cannot "
                "be told, and so it cannot be cut."
            )
    return map_leaves(
        lambda leaf: leaf[start:stop] if _has_rows(leaf) and len(leaf) == total else leaf, batch, is_leaf=holds_rows
    )


def real_rows(batch: Any, rows: Rows) -> Any:
    """Return a batch without the rows that repeat samples; up to two of them where it has no others.

    Two, since a rank whose batch weighs nothing runs its model all the same, and BatchNorm needs two.

    Args:
        batch: The batch.
        rows: How many samples it is made of, and how many of these are no repeats.

    Raises:
        ConfigurationError: If it has not one row for each sample.

    Example:
        >>> real_rows(["a cat", "a dog", "a cat"], Rows(total=3, real=2))
        ['a cat', 'a dog']
    """
    if rows.real == 0 and rows.total <= TAKING_PART:
        return batch
    held = count_rows(batch)
    if held == rows.total:
        return take_rows(batch, 0, rows.real or TAKING_PART, rows.total)
    if rows.real == 0:
        return batch
    raise ConfigurationError(
        f"{rows.total - rows.real} of the {rows.total} samples of this batch are repeated so that all ranks have as "
        f"many, and cannot be removed: the batch has {'no' if held is None else held} rows, so collate_fn does not "
        "make one row of each sample. Use drop_last=True, or leave dispatch_batches and split_batches out: then "
        "samples are not repeated."
    )


def check_splits(batch: Any, samples: int | None) -> None:
    """Check that a batch can be computed in parts of some rows.

    Args:
        batch: The batch.
        samples: How many samples it is made of, if that is known.

    Raises:
        ConfigurationError: If it has not one row for each sample, or rows in different numbers.
    """
    held = count_rows(batch)
    if samples is not None and held != samples:
        raise ConfigurationError(
            f"A batch of {samples} samples did not fit into memory and cannot be split: it has "
            f"{'no' if held is None else held} rows, so collate_fn does not make one row of each sample. Use a smaller "
            "batch size, or have collate_fn return one row a sample."
        )
    take_rows(batch, 0, 1)


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim > 0
    return isinstance(leaf, (list, tuple))
