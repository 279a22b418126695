"""Sharded tensors: this rank's part as a plain tensor, and gradients that are split like their weights."""

from typing import Any

from torch import Tensor


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor: of a weight that FSDP gathers in fp8, the values behind its wrapper."""
    local = tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", tensor)
    if type(local) is Tensor or not hasattr(local, "fsdp_pre_all_gather"):
        return local
    names, _ = local.__tensor_flatten__()
    inner = getattr(local, names[0])
    return inner if (inner.shape, inner.dtype) == (local.shape, local.dtype) else local


def laid_out(gradient: Any, weight: Any) -> Any:
    """Return a gradient split like its weight: a backward may leave it split otherwise, or summed only in part."""
    if not hasattr(weight, "_local_tensor") or gradient.placements == weight.placements:
        return gradient
    return gradient.redistribute(weight.device_mesh, weight.placements)
