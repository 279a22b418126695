"""Gathering for metrics, without the samples that a loader repeated to make ranks even."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.collectives.object_collectives import gather_per_data_rank, joined
from trainer_lib.collectives.ragged_gather import gather_rows_or_raise, holds_rows
from trainer_lib.collectives.shape_check import check_dense
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.pytree import map_leaves
from trainer_lib.logging import get_logger
from trainer_lib.state.gradient_state import Rows

_logger = get_logger(__name__)


def gather_real_rows(tree: Any, rows: Rows | None) -> Any:
    """Return the rows of all ranks in order of rank, without those of repeated samples.

    Args:
        tree: Tensors with one row per sample (or the same number for each), lists with one item per sample, and
            structures of both. A tensor without dimensions, such as the mean loss of a batch, is one value per rank.
        rows: How many leading samples of this rank's batch are real; `None` if all are.

    Example:
        >>> import torch
        >>> gather_real_rows(torch.tensor([3, 1, 3]), Rows(total=3, real=2))
        tensor([3, 1])
    """
    error, real = HeldError("gather_for_metrics"), None
    with error.held():
        check_dense("gather_for_metrics", tree)
        real = map_leaves(lambda leaf: _real_part(leaf, rows), tree, is_leaf=holds_rows)
    return gather_rows_or_raise("gather_for_metrics", real, error)


def gather_real_objects(value: Any, rows: Rows | None) -> list[Any]:
    """Return the objects of all ranks in order of rank, without the items of repeated samples.

    Lists and tuples are joined to one list; anything else counts as one object per rank.

    Example:
        >>> gather_real_objects(["a cat", "a dog", "a cat"], Rows(total=3, real=2))
        ['a cat', 'a dog']
    """
    error, real = HeldError("gather_for_metrics"), None
    with error.held():
        real = _real_items(value, rows)
    by_rank = gather_per_data_rank(error.pack(real))
    error.raise_first([report for report, _ in by_rank])
    return joined(real for _, real in by_rank)


def _real_items(value: Any, rows: Rows | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _real_items(column, rows) for key, column in value.items()}
    is_column = isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0)
    return value[: _real_count(len(value), rows)] if is_column else value


def _real_part(leaf: Any, rows: Rows | None) -> Any:
    if isinstance(leaf, Tensor) and leaf.ndim == 0:
        return leaf[None][: _real_values(rows)]
    return leaf[: _real_count(len(leaf), rows)] if isinstance(leaf, Tensor) or holds_rows(leaf) else leaf


def _real_values(rows: Rows | None) -> int:
    """Return whether a value of the whole batch counts, as a number of values."""
    if rows is None or rows.real == rows.total:
        return 1
    _logger.warning_once(
        "gather_for_metrics got one value (a 0-d tensor) of a batch in which the loader repeated samples to make ranks "
        "even. If it is their mean, they count in it. Pass one value per sample, such as loss.repeat(batch_size), and "
        "they do not.",
        main_process_only=False,
    )
    return min(rows.real, 1)


def _real_count(count: int, rows: Rows | None) -> int:
    """Return how many of `count` leading rows belong to real samples."""
    if rows is None:
        return count
    if rows.full is not None and count == rows.full > rows.total:
        # `loss.repeat(batch_size)` with the size of a full batch: it stands for the real samples.
        return rows.real
    if rows.real == rows.total:
        return count
    if not rows.real:
        return 0
    if count % rows.total == 0:
        return count // rows.total * rows.real
    raise ConfigurationError(
        f"gather_for_metrics got {count} rows for a batch of {rows.total} samples, {rows.total - rows.real} of which "
        "the loader repeated to make ranks even, so it is unknown which rows to drop. Pass one row per sample (or the "
        "same number for each), filter after gathering, or prepare the loader with even_batches=False."
    )
