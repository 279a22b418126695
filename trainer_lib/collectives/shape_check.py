"""This file is the check that all processes hand a collective the same structure, shapes and types."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.foundation.pytree import named_leaves, never
from trainer_lib.state.partial_state import PartialState

_SHOWN = 5  # leaves that an error lists before it only counts

_ADVICE = {
    "gather": "Pad with pad_across_processes first. Where only the number of rows differs, use gather_for_metrics.",
    "gather_for_metrics": "Only the first dimension may differ. Pad the others first: pad_across_processes(…, dim=1).",
    "reduce": "Reduce what has one shape everywhere, such as sums and counts.",
    "broadcast": "Make tensors of the sender's shapes on the receivers, or use broadcast_object_list.",
    "pad_across_processes": "Give all processes as many tensors, of as many dimensions.",
}


@dataclass(frozen=True)
class Leaf:
    """What one leaf of a tree looks like, without its values."""

    name: str
    kind: str
    shape: tuple[int, ...] | None = None  # None: not a tensor
    device: str = ""

    def __str__(self) -> str:
        """Return the leaf as an error shows it."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        device = "" if self.device in ("", "cpu") else f" on {self.device}"
        return f"{self.name or 'it'}: {self.kind}{shape}{device}"


Layout = tuple[Leaf, ...]


def layout(tree: Any, is_leaf: Callable[[Any], bool] = never) -> Layout:
    """Return what the leaves of `tree` look like, in order."""
    return tuple(_described(name, leaf, is_leaf) for name, leaf in named_leaves(tree, is_leaf))


def whole(leaf: Leaf) -> Hashable:
    """Return what has to agree where whole tensors are combined: everything."""
    return leaf


def without_sizes(leaf: Leaf) -> Hashable:
    """Return what has to agree where sizes may differ."""
    return leaf.name, leaf.kind, leaf.shape and len(leaf.shape)


def without_rows(leaf: Leaf) -> Hashable:
    """Return what has to agree where the first dimension may differ."""
    return leaf.name, leaf.kind, leaf.shape and leaf.shape[1:], leaf.device


def verify(operation: str, tree: Any, compared: Callable[[Leaf], Hashable] = whole) -> None:
    """In debug mode, raise on all processes unless they hand in the same."""
    state = PartialState()
    if state.debug:
        check_layouts(operation, state.group.all_gather_objects(layout(tree)), compared)


def check_layouts(operation: str, layouts: Sequence[Layout], compared: Callable[[Leaf], Hashable] = whole) -> None:
    """Raise unless the layouts of all processes agree in what is `compared`.

    All processes have to see the same `layouts`, so that all raise or none.
    """
    different = [
        index
        for index, leaves in enumerate(zip_longest(*layouts))
        if len({None if leaf is None else compared(leaf) for leaf in leaves}) > 1
    ]
    if not different:
        return
    shown = [_shown(layout, different) for layout in layouts]
    lines = [f"  {_processes(shown, text)}: {text}" for text in dict.fromkeys(shown)]
    raise DistributedOperationException(
        f"{operation} needs the same structure, shapes and types on all processes, and got\n"
        + "\n".join(lines)
        + f"\n{_ADVICE.get(operation, 'Make them the same.')}"
    )


def _described(name: str, leaf: Any, is_leaf: Callable[[Any], bool]) -> Leaf:
    if isinstance(leaf, Tensor):
        # A nested tensor has no sizes to speak of.
        shape = None if leaf.is_nested else tuple(leaf.shape)
        return Leaf(name, str(leaf.dtype).removeprefix("torch."), shape, leaf.device.type)
    return Leaf(name, "rows" if is_leaf(leaf) else "object")


def _shown(layout: Layout, indices: Sequence[int]) -> str:
    texts = [str(layout[index]) if index < len(layout) else "nothing" for index in indices]
    more = len(texts) - _SHOWN
    return "; ".join(dict.fromkeys(texts[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


def _processes(shown: Sequence[str], text: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(shown) if other == text]
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(ranks)}"
