"""Attention without values as a fused kernel: it keeps no scores for the backward, as on CPU and CUDA devices."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def fused_attention() -> Generator[None]:
    """Return the context in which `F.scaled_dot_product_attention` keeps what the flash kernel keeps.

    Without it, torch computes attention with a mask from its parts, and keeps the scores of each pair of tokens. It is
    replaced by name: a mode of torch would not see what a backward computes again.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        copies = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(copies, -3), value.repeat_interleave(copies, -3)
    del attn_mask, dropout_p  # they do not matter for what is kept
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]
    return kernel(query, key, value, 0.0, is_causal, scale=scale)[0]
