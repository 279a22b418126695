"""Which blocks of queries and keys a rank computes, and the masks of these blocks."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_lib.context_parallel.sequence_layout import SequenceLayout
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_ALL = slice(None)


@frozen_dataclass
class AttentionRule:
    """Which keys a query attends to, by their positions in the whole sequence.

    Args:
        is_causal: Only to keys at its own position and before.
        keep: The keys that are no padding, as [batch, length] of the whole sequences.
        documents: The number of the document that each position belongs to, as [batch, length]; a query attends to
            keys of its own document.
        window: Only to its own position and the `window - 1` before, and if not causal, as many after.
    """

    is_causal: bool = False
    keep: Tensor | None = None
    documents: Tensor | None = None
    window: int | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether the rule is more than causal or not."""
        return self.keep is not None or self.documents is not None or self.window is not None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return where queries at these positions may attend to keys at those, as [batch, 1, queries, keys]."""
        allowed = torch.ones(1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
        if self.is_causal:
            allowed = allowed & (queries[:, None] >= keys)
        if self.window is not None:
            allowed = allowed & ((queries[:, None] - keys).abs() < self.window)
        if self.documents is not None:
            allowed = allowed & (self.documents[:, queries, None] == self.documents[:, None, keys])
        if self.keep is not None:
            allowed = allowed & self.keep[:, None, keys]
        return allowed.unsqueeze(1)


class Block(NamedTuple):
    """A part of this rank's queries, and the part of a rank's keys that they attend to."""

    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None


class Blocks:
    """The blocks of a rank's queries with the keys of each rank.

    Args:
        layout: How sequences are cut.
        rule: Which keys a query attends to.
        local_length: How many positions a rank holds.
        device: Where masks are made.
    """

    def __init__(self, layout: SequenceLayout, rule: AttentionRule, local_length: int, device: torch.device) -> None:
        self._layout, self._rule, self._device = layout, rule, device
        self._local, self._length = local_length, local_length * layout.size

    def with_keys_of(self, source: int) -> Iterator[Block]:
        """Yield the block with the keys of a rank, if this rank's queries attend to some of them."""
        slices = self._slices(source)
        if slices is None:
            return
        queries, keys = slices
        if self._rule.needs_mask:
            yield Block(
                queries, keys, False, self._rule.mask(self._positions()[queries], self._positions(source)[keys])
            )
        else:
            yield Block(queries, keys, self._rule.is_causal and source == self._layout.rank, None)

    def _slices(self, source: int) -> tuple[slice, slice] | None:
        """Return the queries and keys that may attend to each other; those left out never do."""
        rank, half = self._layout.rank, self._local // 2
        if not self._rule.is_causal or source == rank:
            return _ALL, _ALL
        if not self._layout.balanced:
            return (_ALL, _ALL) if source < rank else None
        # The head of an earlier rank comes before both parts of this one, and its tail after both.
        return (_ALL, slice(half)) if source < rank else (slice(half, None), _ALL)

    def _positions(self, rank: int | None = None) -> Tensor:
        return self._layout.positions(self._length, rank, self._device)
