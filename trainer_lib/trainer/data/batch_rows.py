"""Counting and slicing the rows of a batch, and tensors as arrays."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.data_loader.order.samples_per_rank import TAKING_PART
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.pytree import leaves, map_leaves, named_leaves

if TYPE_CHECKING:
    from trainer_lib.state.gradient_state import Rows


def count_rows(batch: Any) -> int | None:
    """Return the number of rows of the first tensor, array or list in a batch; `None` if the batch holds none.

    Those of a `PackedSequence` are its sequences.

    Example:
        >>> count_rows({"texts": ["a cat", "a dog"], "scale": 2.0})
        2
    """
    return next((_rows(leaf) for leaf in leaves(batch, is_leaf=_is_leaf) if _has_rows(leaf)), None)


def take_rows(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Return the rows of a batch from `start` to `stop`, sliced from its tensors, arrays and lists.

    Values without rows or with a single row, such as a mask for all samples, stay unchanged.

    Args:
        batch: The batch.
        start: The first row.
        stop: The row after the last.
        total: The number of rows of the batch; `None` counts them.

    Raises:
        ConfigurationError: If a value in the batch has another number of rows.

    Example:
        >>> take_rows({"texts": ["a cat", "a dog", "a cow"], "scale": 2.0}, 0, 2)
        {'texts': ['a cat', 'a dog'], 'scale': 2.0}
    """
    total = total or count_rows(batch)
    for name, leaf in named_leaves(batch, is_leaf=_is_leaf):
        if _has_rows(leaf) and _rows(leaf) not in (1, total):
            raise ConfigurationError(
                f"A batch can be split only if all its values have as many rows: this one has {total} rows, and "
                f"{name or 'a value in it'} has {_rows(leaf)}. Return one row per sample from collate_fn."
            )
    return map_leaves(
        lambda leaf: _cut(leaf, start, stop) if _has_rows(leaf) and _rows(leaf) == total else leaf,
        batch,
        is_leaf=_is_leaf,
    )


def real_rows(batch: Any, rows: "Rows") -> Any:
    """Return a batch without the rows that repeat samples, or two of these rows if it has no others.

    A rank without samples of its own still runs the model, with weight 0, and BatchNorm needs two rows.

    Args:
        batch: The batch.
        rows: The number of samples in the batch, and how many of them are not repeats.

    Raises:
        ConfigurationError: If the batch does not have one row per sample.

    Example:
        >>> from trainer_lib.state.gradient_state import Rows
        >>> real_rows(["a cat", "a dog", "a cat"], Rows(total=3, real=2))
        ['a cat', 'a dog']
    """
    if rows.real == 0 and rows.total <= TAKING_PART:
        return batch
    count = count_rows(batch)
    if count == rows.total:
        return take_rows(batch, 0, rows.real or TAKING_PART, rows.total)
    if rows.real == 0:
        return batch
    raise ConfigurationError(
        f"{rows.total - rows.real} of the {rows.total} samples of this batch are repeats that fill up the batches of "
        f"all ranks, and cannot be removed: the batch has {'no' if count is None else count} rows, so collate_fn does "
        "not return one row per sample. Use drop_last=True, or leave dispatch_batches and split_batches out: then "
        "samples are not repeated."
    )


def check_splits(batch: Any, samples: int | None) -> None:
    """Check that a batch can be split into micro-batches.

    Args:
        batch: The batch.
        samples: The number of samples in the batch; `None` if unknown.

    Raises:
        ConfigurationError: If the batch does not have one row per sample, or its values differ in their rows.
    """
    count = count_rows(batch)
    if samples is not None and count != samples:
        raise ConfigurationError(
            f"A batch of {samples} samples did not fit into memory and cannot be split: it has "
            f"{'no' if count is None else count} rows, so collate_fn does not return one row per sample. Use a smaller "
            "batch size, or a collate_fn that returns one row per sample."
        )
    take_rows(batch, 0, 1)


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; numpy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _is_leaf(tree: Any) -> bool:
    return type(tree) is PackedSequence or holds_rows(tree)


def _rows(leaf: Any) -> int:
    return int(leaf.batch_sizes[0]) if type(leaf) is PackedSequence else len(leaf)


def _cut(leaf: Any, start: int, stop: int) -> Any:
    if type(leaf) is PackedSequence:
        return pack_sequence(unpack_sequence(leaf)[start:stop], enforce_sorted=False)
    return leaf[start:stop]


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim > 0
    return isinstance(leaf, (list, tuple))
