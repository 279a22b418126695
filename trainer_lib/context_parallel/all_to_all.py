"""Attention on whole sequences with a part of the heads on each rank (Ulysses), by two exchanges of all with all."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer_lib.context_parallel.blocks import AttentionRule
from trainer_lib.foundation.errors import ConfigurationError

_attention = F.scaled_dot_product_attention  # while it is replaced, this is still torch's
_HEADS, _POSITIONS = 1, 2


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Any, rule: AttentionRule, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks of a group. All of them call it.

    Ranks hold consecutive parts of a sequence.

    Raises:
        ConfigurationError: If the heads cannot be shared out.
    """
    size = dist.get_world_size(group)
    heads = query.shape[1]
    if heads % size:
        nearest = min((n for n in range(1, heads + 1) if not heads % n), key=lambda n: abs(n - size))
        raise ConfigurationError(
            f"sp_size={size} cannot share out the {heads} attention heads of a rank (the model's, divided by "
            f"tp_size). The nearest size that does is {nearest}. Choose sizes whose product divides the model's heads, "
            "or cp_size, which does not split heads."
        )
    key, value = _shareable(key, query, size), _shareable(value, query, size)
    query, key, value = (_Swap.apply(tensor, group, _HEADS, _POSITIONS) for tensor in (query, key, value))  # type: ignore[misc]
    groups, mask = query.shape[1] // key.shape[1], None
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if rule.needs_mask:
        positions = torch.arange(query.shape[2], device=query.device)
        mask = rule.mask(positions, positions)
    out = _attention(query, key, value, mask, dropout_p, rule.is_causal and mask is None, scale=scale)
    return _Swap.apply(out, group, _POSITIONS, _HEADS)  # type: ignore[return-value]


def _shareable(tensor: Tensor, query: Tensor, size: int) -> Tensor:
    """Return keys or values with as many heads as can be shared out."""
    heads = tensor.shape[1]
    if not heads % size:
        return tensor
    # As few copies as possible; each head of the queries always works.
    return tensor.repeat_interleave(size // heads if not size % heads else query.shape[1] // heads, dim=1)


class _Swap(torch.autograd.Function):
    """Splits a tensor along one dimension and joins what arrives along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), split))
        arriving = torch.empty_like(parts)
        dist.all_to_all_single(arriving, parts, group=group)
        return torch.cat(arriving.unbind(), join)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _Swap.apply(gradient.contiguous(), ctx.group, ctx.join, ctx.split), None, None, None
