"""Ring attention: attention over the keys of all ranks, block by block; keys may be gathered instead."""

import math
from typing import Any

import torch
from torch import Tensor

from trainer_lib.context_parallel.attention.block_attention import attend, attend_backward
from trainer_lib.context_parallel.attention.block_masks import Blocks
from trainer_lib.context_parallel.attention.exchange import Exchange


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, blocks: Blocks, scale: float
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks of a group. All of them call it.

    Args:
        query: This rank's queries [batch, heads, positions, features].
        key: This rank's keys.
        value: This rank's values.
        exchange: How ranks get each other's keys and values.
        blocks: What is computed of them.
        scale: The factor of the scores.
    """
    return _Blockwise.apply(query, key, value, exchange, blocks, scale)  # type: ignore[return-value]


class _Blockwise(torch.autograd.Function):
    """Keeps this rank's tensors alone for the backward, which exchanges keys and values again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, blocks: Blocks, scale: float
    ) -> Tensor:
        shape, dtype = query.shape[:-1], torch.promote_types(query.dtype, torch.float32)
        lse = torch.full(shape, -math.inf, dtype=dtype, device=query.device)
        out = torch.zeros(*shape, value.shape[-1], dtype=dtype, device=query.device)
        for source, (keys, values) in exchange.tensors_of_all([key, value]):
            for block in blocks.with_keys_of(source):
                rows = block.queries
                _merge(
                    out[:, :, rows],
                    lse[:, :, rows],
                    *attend(
                        query[:, :, rows], keys[:, :, block.keys], values[:, :, block.keys],
                        block.is_causal, block.mask, scale,
                    ),
                )  # fmt: skip
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.exchange, ctx.blocks, ctx.scale = exchange, blocks, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        of_keys = ctx.exchange.gradients([key, value])
        for source, (keys, values) in ctx.exchange.tensors_of_all([key, value]):
            sums = [torch.zeros_like(keys, dtype=lse.dtype), torch.zeros_like(values, dtype=lse.dtype)]
            for block in ctx.blocks.with_keys_of(source):
                rows, columns = block.queries, block.keys
                gradients = attend_backward(
                    gradient[:, :, rows].contiguous(), query[:, :, rows], keys[:, :, columns], values[:, :, columns],
                    out[:, :, rows], lse[:, :, rows].contiguous(), block.is_causal, block.mask, ctx.scale,
                )  # fmt: skip
                of_query[:, :, rows] += gradients[0]
                sums[0][:, :, columns] += gradients[1]
                sums[1][:, :, columns] += gradients[2]
            of_keys.add(source, sums)
        of_key, of_value = of_keys.total()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _merge(out: Tensor, lse: Tensor, of_block: Tensor, lse_of_block: Tensor) -> None:
    """Merge the outputs of a block into those so far, in place."""
    merged = torch.logaddexp(lse, lse_of_block.to(lse.dtype))
    base = merged.masked_fill(merged == -math.inf, 0.0)  # no key so far: both factors are 0
    out.mul_((lse - base).exp().unsqueeze(-1))
    out.add_(of_block * (lse_of_block - base).exp().unsqueeze(-1))
    lse.copy_(merged)
