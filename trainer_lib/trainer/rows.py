"""This file is the rows of a batch: how many it has, and taking some of them."""

from typing import Any

import numpy as np
from torch import Tensor

from trainer_lib.collectives.rows import holds_rows
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.trees import leaves, map_leaves, named_leaves


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


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim > 0
    return isinstance(leaf, (list, tuple))
