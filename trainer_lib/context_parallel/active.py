"""The sequences that ranks hold parts of right now, for whoever computes attention on them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from trainer_lib.context_parallel.attention.block_masks import AttentionRule
from trainer_lib.context_parallel.sequence_ranks import SequenceRanks
from trainer_lib.foundation.errors import UnsupportedError


class CutSequences:
    """Sequences of which each rank of a group holds a part.

    Args:
        ranks: The ranks.
        length: The length of the whole sequences; `None`: any.
        real_length: Their length without what was added at the end so that they can be cut.
        documents: The number of the document that each position belongs to, as [batch, length].
        knows_documents: Whether there are no documents if none are given.

    Attributes:
        attentions: How many attentions were computed over the ranks.
    """

    documents: Tensor | None
    length: int | None
    ranks: SequenceRanks
    attentions: int

    _in_use: ClassVar[list["CutSequences"]] = []  # an evaluation inside the loop over a training loader adds its own

    def __init__(
        self,
        ranks: SequenceRanks,
        length: int | None = None,
        real_length: int | None = None,
        documents: Tensor | None = None,
        knows_documents: bool = False,
    ) -> None:
        self.ranks, self.length, self.documents = ranks, length, documents
        self.knows_documents: bool = knows_documents
        self.real_length: int | None = length if real_length is None else real_length
        self.attentions = 0

    @classmethod
    def active(cls) -> "CutSequences | None":
        """Return the sequences that are cut right now, if any are."""
        return cls._in_use[-1] if cls._in_use else None

    @contextmanager
    def in_use(self) -> Generator["CutSequences"]:
        """Return the context in which attention runs over the ranks."""
        self._in_use.append(self)
        try:
            yield self
        finally:
            self._in_use.remove(self)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        keep: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys of all.

        Args:
            query: This rank's queries [batch, heads, positions, features].
            key: This rank's keys.
            value: This rank's values.
            keep: The keys that are no padding, as [batch, length] of the whole sequences.
            is_causal: Whether a query attends to earlier keys only.
            scale: The factor of the scores.
            window: A query attends to its own position and the `window - 1` before, and if not causal, as many after.
            dropout_p: The probability of dropout.
        """
        self._check_lengths(query, key)
        self.attentions += 1
        length = query.shape[2] * self.ranks.layout.size
        real = length if self.real_length is None else self.real_length
        if keep is None and not is_causal and real < length:  # with causal attention nothing real looks there
            keep = (torch.arange(length, device=query.device) < real).unsqueeze(0)
        rule = AttentionRule(is_causal, keep, self.documents, window)
        return self.ranks.attention(query, key, value, rule, scale=scale, dropout_p=dropout_p)

    def whole_mask(self, mask: Tensor) -> Tensor:
        """Return the mask [batch, length] of the whole sequences for one of theirs or of this rank's part."""
        if self.length is not None and mask.shape[1] == self.length:
            return mask.bool()
        return self.ranks.gather(mask.to(torch.uint8), 1).bool()

    def _check_lengths(self, query: Tensor, key: Tensor) -> None:
        local = query.shape[2] if self.length is None else self.length // self.ranks.layout.size
        if query.shape[2] != local or key.shape[2] != local:
            raise UnsupportedError(
                f"An attention of {query.shape[2]} queries to {key.shape[2]} keys cannot be computed on parts of "
                f"sequences: each rank holds {local} positions. Context parallelism cuts self-attention over the whole "
                "sequence; set cp_size and sp_size to 1 for models with other attention."
            )
