"""Gathering rows, where ranks have different numbers of them."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.collectives.agreement import ErrorReport, HeldError
from trainer_lib.collectives.object_collectives import gather_per_data_rank, joined
from trainer_lib.collectives.shape_check import Layout, Leaf, check_dense, check_layouts, layout, without_rows
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import leaves, map_leaves, tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.partial_state import PartialState


def gather_rows(tree: Any) -> Any:
    """Return the rows of all ranks in order of rank; their numbers may differ, and be 0.

    Ranks that read the same batch, as parts of one replica of a model, count as one.

    Tensors and numpy arrays have rows, and so have lists of items (see `holds_rows`). For anything else, the list of
    the values of all ranks is returned; for `None`, `None`.

    Example:
        >>> gather_rows({"ids": torch.tensor([4, 5]), "texts": ["a cat", "a dog"]})
        {'ids': tensor([4, 5]), 'texts': ['a cat', 'a dog']}
    """
    error = HeldError("gather_for_metrics")
    with error.held():
        check_dense("gather_for_metrics", tree)
    return gather_rows_or_raise("gather_for_metrics", tree, error)


def gather_rows_or_raise(operation: str, tree: Any, error: HeldError) -> Any:
    """Gather rows, or raise on all ranks if a rank holds an error.

    Args:
        operation: The name of the operation in errors.
        tree: The rows of this rank.
        error: Why this rank may not have any.
    """
    local_leaves = list(leaves(tree, is_leaf=holds_rows))
    objects = [None if isinstance(leaf, Tensor) else leaf for leaf in local_leaves]
    headers = gather_per_data_rank(_Header(layout(tree, is_leaf=holds_rows), objects, error.report))
    error.raise_first([header.report for header in headers])
    layouts = _with_empty_filled_in(operation, [header.layout for header in headers])
    group = PartialState().data_group
    gathered: list[Any] = []
    for index, leaf in enumerate(local_leaves):
        if isinstance(leaf, Tensor):
            gathered.append(_gathered_tensor(leaf, [layout[index] for layout in layouts], group))
        else:
            gathered.append(_joined_objects([header.objects[index] for header in headers]))
    in_order = iter(gathered)
    return map_leaves(lambda leaf: next(in_order), tree, is_leaf=holds_rows)


def holds_rows(tree: Any) -> bool:
    """Whether the items of `tree` are rows, one per sample, rather than the parts of a structure.

    They are for a list without tensors, such as decoded texts, and for a tuple of texts and numbers only. A tuple of
    lists holds columns.
    """
    if type(tree) is list:
        return next(tensors(tree), None) is None
    if type(tree) is tuple:
        return not any(isinstance(item, (Tensor, list, tuple, np.ndarray)) for item in tree) and (
            next(tensors(tree), None) is None
        )
    return isinstance(tree, np.ndarray) and tree.ndim > 0


@frozen_dataclass
class _Header:
    """What a rank sends to the others before its tensors."""

    layout: Layout
    objects: list[Any]  # the leaves that are no tensors
    report: ErrorReport | None


def _with_empty_filled_in(operation: str, layouts: list[Layout]) -> list[Layout]:
    """Return the layouts; a tensor without rows takes shape and type from a rank that has some."""
    templates = [
        next((leaf for leaf in by_rank if leaf and not _is_empty(leaf)), None) for by_rank in zip_longest(*layouts)
    ]
    agreed = [tuple(map(_filled_in, layout, templates)) for layout in layouts]
    check_layouts(operation, agreed, without_rows)
    return agreed


def _is_empty(leaf: Leaf) -> bool:
    return bool(leaf.shape) and leaf.shape[0] == 0


def _filled_in(leaf: Leaf, template: Leaf | None) -> Leaf:
    if not _is_empty(leaf) or template is None or not template.shape:
        return leaf
    return Leaf(leaf.name, template.kind, (0, *template.shape[1:]), leaf.device)


def _gathered_tensor(tensor: Tensor, by_rank: Sequence[Leaf], group: ProcessGroup) -> Tensor:
    local = by_rank[group.rank]
    assert local.shape is not None
    rows = tensor.detach().to(getattr(torch, local.kind)).reshape(local.shape or (1,))
    counts = [leaf.shape[0] if leaf.shape else 1 for leaf in by_rank]
    most = max(counts)
    if len(rows) < most:
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        rows = padded
    # No rank sends rows if none has any.
    parts = group.all_gather(rows) if most else [rows]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])


def _joined_objects(values: list[Any]) -> Any:
    first = values[0]
    if all(value is None for value in values):
        return None
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate([value for value in values if len(value)] or values[:1])
    return type(first)(joined(values)) if holds_rows(first) else values
