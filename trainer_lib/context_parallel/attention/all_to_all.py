"""Attention on whole sequences with a part of the heads on each rank (Ulysses), by two exchanges of all with all."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer_lib.context_parallel.attention.block_masks import AttentionRule
from trainer_lib.foundation.errors import ConfigurationError

_attention = F.scaled_dot_product_attention  # while it is replaced, this is still torch's
_HEADS, _POSITIONS = 1, 2  # of [batch, heads, positions, features]


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Any, rule: AttentionRule, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks of a group. All of them call it.

    Ranks hold consecutive parts of a sequence.

    Raises:
        ConfigurationError: If the heads cannot be shared out.
    """
    size = dist.get_world_size(group)
    check_heads(query.shape[1], size)
    key, value = _shareable(key, query, size), _shareable(value, query, size)
    query, key, value = _of_whole_sequences((query, key, value), group)
    groups, mask = query.shape[1] // key.shape[1], None
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if rule.needs_mask:
        positions = torch.arange(query.shape[2], device=query.device)
        mask = rule.mask(positions, positions)
    out = _attention(query, key, value, mask, dropout_p, rule.is_causal and mask is None, scale=scale)
    return _Swap.apply(group, False, out)[0]  # type: ignore[no-any-return, no-untyped-call]


def check_heads(heads: int, size: int) -> None:
    """Raise unless ranks can share out the attention heads that each of them has before the exchange.

    Raises:
        ConfigurationError: If their number does not divide the heads; it names the nearest one that does.
    """
    if heads % size:
        nearest = min((n for n in range(1, heads + 1) if not heads % n), key=lambda n: abs(n - size))
        raise ConfigurationError(
            f"sp_size={size} cannot share out the {heads} attention heads of a rank (the model's, divided by "
            f"tp_size). The nearest size that does is {nearest}. Choose sizes whose product divides the model's heads, "
            "or cp_size, which does not split heads."
        )


def _shareable(tensor: Tensor, query: Tensor, size: int) -> Tensor:
    """Return keys or values with as many heads as can be shared out."""
    heads = tensor.shape[1]
    if not heads % size:
        return tensor
    # As few copies as possible; each head of the queries always works.
    return tensor.repeat_interleave(size // heads if not size % heads else query.shape[1] // heads, dim=1)


def _of_whole_sequences(tensors: Sequence[Tensor], group: Any) -> Sequence[Tensor]:
    """Return whole sequences, and this rank's share of the heads, of the queries, the keys and the values."""
    if len({(tensor.shape[-1], tensor.dtype) for tensor in tensors}) == 1:  # then one message takes all three
        return _Swap.apply(group, True, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return [_Swap.apply(group, True, tensor)[0] for tensor in tensors]  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    """Exchanges parts of the sequences of all heads for whole sequences of some heads, or the other way round."""

    @staticmethod
    def forward(ctx: Any, group: Any, gathers_sequences: bool, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.gathers_sequences = group, gathers_sequences
        return _swapped(tensors, group, gathers_sequences)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_swapped(gradients, ctx.group, not ctx.gathers_sequences)


def _swapped(tensors: Sequence[Tensor], group: Any, gathers_sequences: bool) -> tuple[Tensor, ...]:
    size = dist.get_world_size(group)
    split, joined = (_HEADS, _POSITIONS) if gathers_sequences else (_POSITIONS, _HEADS)
    # A part for each rank comes first; the heads of all tensors are side by side.
    parts = [tensor.unflatten(split, (size, -1)).movedim(split, 0) for tensor in tensors]
    sent = (torch.cat(parts, 1 + _HEADS) if len(parts) > 1 else parts[0]).contiguous()
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    if gathers_sequences:  # then it is one copy for all
        whole = arriving.movedim(0, joined).flatten(joined, joined + 1)
        return whole.split([part.shape[1 + _HEADS] for part in parts], _HEADS)
    by_tensor = arriving.split([part.shape[1 + _HEADS] for part in parts], 1 + _HEADS)
    return tuple(part.movedim(0, joined).flatten(joined, joined + 1) for part in by_tensor)
