"""Attention on the meta device as a fused kernel: it keeps no scores for the backward, as on CPU and CUDA devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Within a `with` block, `scaled_dot_product_attention` keeps what the flash kernel keeps.

    Without it, torch computes attention on the meta device from its parts, and keeps the scores of each pair of tokens.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the call of attention."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
    del attn_mask  # its shape does not matter for what is kept
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]
    return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
