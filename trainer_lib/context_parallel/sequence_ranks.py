"""The ranks that share sequences, and attention over them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.context_parallel.attention.all_to_all import all_to_all_attention
from trainer_lib.context_parallel.attention.block_masks import AttentionRule, Blocks
from trainer_lib.context_parallel.attention.exchange import AllGather, Ring, all_gather
from trainer_lib.context_parallel.attention.ring_attention import blockwise_attention
from trainer_lib.context_parallel.sequence_layout import SequenceLayout
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

METHODS = ("ring", "allgather", "ulysses")


class SequenceRanks:
    """The ranks that hold parts of the same sequences.

    Args:
        group: Their process group of torch.
        method: How attention reaches the keys of other ranks: "ring" passes keys and values around, "allgather"
            gathers them, "ulysses" shares out the heads instead.
        balanced: Whether each rank gets a chunk of the head and one of the tail of a sequence, which evens out the work
            of causal attention; not with "ulysses", where the work is even anyway.

    Attributes:
        layout: Which part of a sequence this rank holds.
    """

    group: Any

    def __init__(self, group: Any, method: str = "ring", balanced: bool = True) -> None:
        if method not in METHODS:
            raise ConfigurationError(f"Unknown method {method!r}. Known: {', '.join(METHODS)}.")
        self.group, self.method = group, method
        self.layout: SequenceLayout = SequenceLayout(
            dist.get_world_size(group), dist.get_rank(group), balanced and method != "ulysses"
        )
        self._exchange = AllGather(group) if method == "allgather" else Ring(group)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
        *,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys of all. All ranks of the group call it.

        Args:
            query: This rank's queries [batch, heads, positions, features].
            key: This rank's keys; there may be fewer heads of them, each for a group of query heads.
            value: This rank's values.
            rule: Which keys a query attends to.
            scale: The factor of the scores; by default 1 / √features.
            dropout_p: The probability of dropout; with "ulysses" only.
        """
        query, key, value = _in_autocast(query, key, value)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if self.method == "ulysses":
            return all_to_all_attention(query, key, value, self.group, rule, scale, dropout_p)
        if dropout_p:
            raise UnsupportedError(
                f"Context parallelism has no dropout of attention weights (got {dropout_p}). Set the model's attention "
                "dropout to 0 (attention_dropout, attn_pdrop or attention_probs_dropout_prob of its config), or use "
                "sp_size instead of cp_size."
            )
        blocks = Blocks(self.layout, rule, query.shape[2], query.device)
        return blockwise_attention(query, key, value, self._exchange, blocks, scale)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of the parts on all ranks. All ranks of the group call it."""
        return self.layout.join(all_gather(tensor, self.group), dim)

    def total(self, values: Tensor) -> Tensor:
        """Return the sums of values over the ranks. All ranks of the group call it."""
        values = values.clone()
        dist.all_reduce(values, group=self.group)
        return values


def _in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the type that torch's own attention would compute with."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
