"""Checks that a collective can combine what ranks pass: dense tensors, of one structure, shapes and types."""

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import leaves, named_leaves, never
from trainer_lib.state.partial_state import PartialState

_SHOWN = 5  # leaves that an error lists before it only counts

_ADVICE = {
    "gather": "Pad with pad_across_processes first. Where only the number of rows differs, use gather_for_metrics.",
    "gather_for_metrics": "Only the first dimension may differ. Pad the others first: pad_across_processes(…, dim=1). "
    "A list with one dict or tensor per sample is gathered by gather_for_metrics(…, use_gather_object=True).",
    "reduce": "Reduce what has one shape everywhere, such as sums and counts.",
    "broadcast": "Make tensors of the sender's shapes on the receivers, or use broadcast_object_list.",
    "pad_across_processes": "Pass the same number of tensors, with the same number of dimensions, on all ranks.",
}


@frozen_dataclass
class Leaf:
    """The description of one leaf of a tree, without its values."""

    name: str
    kind: str
    shape: tuple[int, ...] | None = None  # None: not a tensor
    device: str = ""

    def __str__(self) -> str:
        """Return the leaf as errors show it."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        device = "" if self.device in ("", "cpu") else f" on {self.device}"
        return f"{self.name or 'the value'}: {self.kind}{shape}{device}"


Layout = tuple[Leaf, ...]


def check_dense(operation: str, tree: Any, allows_nested: bool = False) -> None:
    """Raise if a tensor of `tree` is nested, sparse or quantized, or if a container is a `PackedSequence`.

    Ranks exchange the memory of dense tensors. The tensors of a `PackedSequence` are no rows of samples.
    """
    for leaf in leaves(tree, is_leaf=is_packed):
        if isinstance(leaf, Tensor):
            problem = None if allows_nested and leaf.is_nested else _not_dense(leaf)
        else:
            problem = _PACKED if is_packed(leaf) else None
        if problem is not None:
            raise TypeError(f"{operation} got {problem}")


def is_packed(tree: Any) -> bool:
    """Whether `tree` is a `PackedSequence`."""
    return isinstance(tree, PackedSequence)


_PACKED = (
    "a PackedSequence, whose tensors cannot be combined between ranks. Pad it: "
    "pad_packed_sequence(sequence, batch_first=True), then pad_across_processes(…, dim=1)."
)


def _not_dense(tensor: Tensor) -> str | None:
    """Return what a tensor is instead of dense, and how to make it dense."""
    if tensor.is_nested:
        return (
            "a nested tensor, and needs dense ones. Pad it: torch.nested.to_padded_tensor(tensor, 0.0), then "
            "pad_across_processes(…, dim=1)."
        )
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout}), and needs dense ones. Convert it: tensor.to_dense()."
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), and needs plain ones. Convert it: tensor.dequantize()."
    return None


def layout(tree: Any, is_leaf: Callable[[Any], bool] = never) -> Layout:
    """Return the descriptions of the leaves of `tree`, in order."""
    return tuple(_described(name, leaf, is_leaf) for name, leaf in named_leaves(tree, is_leaf))


def whole(leaf: Leaf) -> Hashable:
    """Return what has to be equal where whole tensors are combined: everything."""
    return leaf


def without_sizes(leaf: Leaf) -> Hashable:
    """Return what has to be equal where sizes may differ."""
    return leaf.name, leaf.kind, leaf.shape and len(leaf.shape)


def without_rows(leaf: Leaf) -> Hashable:
    """Return what has to be equal where the first dimension may differ."""
    return leaf.name, leaf.kind, leaf.shape and leaf.shape[1:], leaf.device


def verify(operation: str, tree: Any, compared: Callable[[Leaf], Hashable] = whole) -> None:
    """In debug mode, raise on all ranks unless they pass the same structure."""
    state = PartialState()
    if state.debug:
        check_layouts(operation, state.group.all_gather_objects(layout(tree)), compared)


def check_layouts(operation: str, layouts: Sequence[Layout], compared: Callable[[Leaf], Hashable] = whole) -> None:
    """Raise unless the layouts of all ranks are equal in what `compared` returns.

    All ranks have to pass the same `layouts`, so that all raise or none.
    """
    different = [
        index
        for index, leaves in enumerate(zip_longest(*layouts))
        if len({None if leaf is None else compared(leaf) for leaf in leaves}) > 1
    ]
    if not different:
        return
    shown = [_shown(layout, different) for layout in layouts]
    lines = [f"  {_named_ranks(shown, text)}: {text}" for text in dict.fromkeys(shown)]
    raise DistributedOperationException(
        f"{operation} needs the same structure, shapes and types on all ranks, and got\n"
        + "\n".join(lines)
        + f"\n{_ADVICE.get(operation, 'Make them the same.')}"
    )


def _described(name: str, leaf: Any, is_leaf: Callable[[Any], bool]) -> Leaf:
    if isinstance(leaf, Tensor):
        # A nested tensor has no fixed sizes.
        shape = None if leaf.is_nested else tuple(leaf.shape)
        return Leaf(name, str(leaf.dtype).removeprefix("torch."), shape, leaf.device.type)
    return Leaf(name, "rows" if is_leaf(leaf) else "object")


def _shown(layout: Layout, indices: Sequence[int]) -> str:
    texts = [str(layout[index]) if index < len(layout) else "nothing" for index in indices]
    more = len(texts) - _SHOWN
    return "; ".join(dict.fromkeys(texts[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


def _named_ranks(shown: Sequence[str], text: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(shown) if other == text]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective of your own so that, in debug mode, it raises unless all ranks pass the same structure.

    The tensors are its first argument, or the argument `tensor`.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        verify(function.__name__, kwargs["tensor"] if "tensor" in kwargs else args[0])
        return function(*args, **kwargs)

    return checked


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls collectives so that their errors name it too."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"A collective in {function.__name__} failed: {error}") from error

    return named
