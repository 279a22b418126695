"""Attention of a block of queries to a block of keys, with the log-sum-exp that merging blocks needs."""

import math
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.device_types import has_flash_attention

_aten: Any = torch.ops.aten
_ALIGNED = 16  # what the last stride of a bias has to be a multiple of on CUDA


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs and, for each query, the log of the sum of its exponentiated scores.

    A query that may attend to no key has the output 0 and the sum 0, so its log is -inf.

    Args:
        query: Queries [batch, heads, queries, features].
        key: Keys; there may be fewer heads of them, each for a group of query heads.
        value: Values.
        is_causal: Query number `i` attends to the keys up to number `i`.
        mask: True where a query may attend to a key, as [batch, 1 or heads, queries, keys].
        scale: The factor of the scores.
    """
    key, value = _for_heads(key, query), _for_heads(value, query)
    kernel = _kernel(query, value, mask)
    if kernel == "cpu":
        bias = None if mask is None else _bias(mask, query.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif kernel == "flash":
        out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[:2]
    elif kernel == "efficient":
        out, lse = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _whole_bias(mask, query), True, 0.0, is_causal, scale=scale
        )[:2]
        lse = lse[..., : query.shape[2]]
    else:
        scores = _scores(query, key, is_causal, mask, scale)
        lse = scores.logsumexp(-1)
        out = _probabilities(scores, lse) @ value.to(scores.dtype)
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out.to(query.dtype), lse


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of one block.

    Args:
        gradient: The gradient of the merged output.
        query: See `attend`.
        key: See `attend`.
        value: See `attend`.
        out: The output, merged over all blocks.
        lse: The log-sum-exp, merged over all blocks.
        is_causal: See `attend`.
        mask: See `attend`.
        scale: See `attend`.
    """
    heads, key, value = key.shape[1], _for_heads(key, query), _for_heads(value, query)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a query attends to nothing: exp(-inf - 0) is 0
    kernel = _kernel(query, value, mask)
    if kernel == "cpu":
        bias = None if mask is None else _bias(mask, query.dtype)
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif kernel == "flash":
        lengths, seed = query.shape[2], query.new_zeros((), dtype=torch.int64)  # without dropout it draws nothing
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, None, None, lengths, key.shape[2], 0.0, is_causal, seed, seed,
            scale=scale,
        )  # fmt: skip
    elif kernel == "efficient":
        seed, padded = query.new_zeros((), dtype=torch.int64), _padded_lse(lse)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _whole_bias(mask, query), out, padded, seed, seed, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )[:3]  # fmt: skip
    else:
        gradients = _plain_backward(gradient, query, key, value, out, lse, is_causal, mask, scale)
    of_query, of_key, of_value = gradients
    return of_query, _of_heads(of_key, heads), _of_heads(of_value, heads)


def _kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return which of torch's kernels computes a block: they need values as wide as queries."""
    if query.shape[-1] != value.shape[-1]:
        return "plain"
    if query.device.type == "cpu":
        return "cpu"
    if not has_flash_attention(query.device.type) or query.shape[-1] % 8:
        return "plain"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if is_half and mask is None and query.shape[-1] <= 256 else "efficient"


def _for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values for each query head."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _of_heads(gradient: Tensor, heads: int) -> Tensor:
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _whole_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the bias for CUDA, with rows that begin at aligned addresses."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    bias = query.new_zeros((*mask.shape[:-1], -(-keys // _ALIGNED) * _ALIGNED))[..., :keys]
    return bias.masked_fill_(~mask, -math.inf).expand(query.shape[0], query.shape[1], -1, -1)


def _padded_lse(lse: Tensor) -> Tensor:
    """Return the log-sum-exp in the length that the kernel on CUDA works in."""
    length = lse.shape[-1]
    return torch.nn.functional.pad(lse, (0, -length % 32), value=math.inf)


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = _probabilities(_scores(query, key, is_causal, mask, scale), lse)
    dtype = probabilities.dtype
    gradient, query, key, value = (tensor.to(dtype) for tensor in (gradient, query, key, value))
    of_value = probabilities.transpose(-1, -2) @ gradient
    inner = (gradient * out.to(dtype)).sum(-1, keepdim=True)
    of_scores = probabilities * (gradient @ value.transpose(-1, -2) - inner) * scale
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, of_value
