"""Counting and slicing the rows of a batch, and tensors as arrays."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.data_loader.order.samples_per_rank import TAKING_PART
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.pytree import leaves, map_leaves, named_leaves, tensors

if TYPE_CHECKING:
    from trainer_lib.state.gradient_state import Rows


def count_rows(batch: Any) -> int | None:
    """Return the number of rows of the first tensor, array or list in a batch; `None` if the batch holds none.

    Those of a `PackedSequence` are its sequences. A list of tensors or of dicts has one row per item if its tensors
    cannot be columns, because they differ in length from each other or from those of the batch.

    Example:
        >>> count_rows({"texts": ["a cat", "a dog"], "scale": 2.0})
        2
        >>> count_rows({"images": torch.ones(2, 3, 8, 8), "boxes": [torch.ones(5, 4), torch.ones(1, 4)]})
        2
    """
    if type(batch) is Tensor:  # the most frequent case
        return len(batch) if batch.ndim else None
    lists: list[Any] = []
    for leaf in leaves(batch, is_leaf=lambda tree: _is_leaf(tree) or _may_hold_samples(tree, batch)):
        if _has_rows(leaf):
            if isinstance(leaf, Tensor) or _is_leaf(leaf):
                return _rows(leaf) if not lists or len(lists[0]) == _rows(leaf) else _rows_in(lists)
            lists.append(leaf)
    return _rows_in(lists) if lists else None


def count_output_rows(predictions: Any, labels: Any) -> int | None:
    """Return the number of rows of the predictions and labels of a batch; those of a list of dicts are the dicts.

    Example:
        >>> count_output_rows([{"boxes": torch.ones(3, 4)}], [{"boxes": torch.ones(3, 4)}])
        1
    """
    for tree in (labels, predictions):
        if type(tree) is Tensor and tree.ndim:
            return len(tree)
        if _may_hold_samples(tree, None) and not isinstance(tree[0], Tensor):
            return len(tree)
    return count_rows((labels, predictions))


def holds_rows_of(batch: Any, total: int | None, unclear: bool = False) -> Callable[[Any], bool]:
    """Return a function that tells which containers in a batch hold one item per sample.

    Among them are lists and tuples of tensors or of dicts, with as many items as there are samples: images of different
    sizes, or the boxes of each image. If all tensors have as many rows as there are samples, a list of tensors holds
    columns.

    Args:
        batch: The batch.
        total: The number of samples.
        unclear: Whether a list of tensors that can be read both ways holds one item per sample.
    """
    found: list[Any] = []

    def is_found(tree: Any) -> bool:
        is_one = _may_hold_samples(tree, batch) and len(tree) == total
        found.extend([tree] if is_one else [])
        return is_one or _is_leaf(tree)

    deque(leaves(batch, is_leaf=is_found), maxlen=0)
    are_samples = unclear or _lengths(found) != {total}
    samples = [id(tree) for tree in found if are_samples or not isinstance(tree[0], Tensor)]
    return lambda tree: _is_leaf(tree) or id(tree) in samples


def take_rows(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Return the rows of a batch from `start` to `stop`, sliced from its tensors, arrays and lists.

    Values without rows or with a single row, such as a mask for all samples, stay unchanged. A list with one item per
    sample, such as the boxes of each image, is sliced as a whole.

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
    is_leaf = holds_rows_of(batch, total)
    for name, leaf in named_leaves(batch, is_leaf=is_leaf):
        if _has_rows(leaf) and _rows(leaf) not in (1, total):
            raise ConfigurationError(
                f"A batch can be split only if all its values have as many rows: this one has {total} rows, and "
                f"{name or 'a value in it'} has {_rows(leaf)}. Return one row per sample from collate_fn."
            )
    return map_leaves(
        lambda leaf: _cut(leaf, start, stop) if _has_rows(leaf) and _rows(leaf) == total else leaf,
        batch,
        is_leaf=is_leaf,
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


def _may_hold_samples(tree: Any, batch: Any) -> bool:
    """Whether the items of a container may be one per sample; those of the batch itself are its fields."""
    if tree is batch or (type(tree) is not list and type(tree) is not tuple) or not tree:
        return False
    if isinstance(tree[0], Tensor):
        return all(isinstance(item, Tensor) for item in tree)
    return all(isinstance(item, Mapping) for item in tree) and next(tensors(tree), None) is not None


def _rows_in(lists: list[Any]) -> int | None:
    """Return the rows of lists that hold one item per sample, or else of the first column."""
    # A tuple of tensors alone may hold what a model returned.
    clear = [tree for tree in lists if type(tree) is list or not isinstance(tree[0], Tensor)]
    if clear and len(_lengths(lists)) > 1:
        return len(next((tree for tree in clear if len(_lengths(tree)) > 1), clear[0]))
    beside_dicts = len(lists) > 1 and any(isinstance(tree[0], Mapping) for tree in lists)
    if beside_dicts and len(set(map(len, lists))) == 1:  # images and their boxes
        return len(lists[0])
    return next((_rows(tensor) for tensor in tensors(lists) if _has_rows(tensor)), None)


def _lengths(tree: Any) -> set[int | None]:
    """Return the lengths of the tensors in a structure; `None` stands for tensors without dimensions alone."""
    lengths = {len(tensor) if tensor.ndim else None for tensor in tensors(tree)}
    return lengths - {None} or lengths


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
