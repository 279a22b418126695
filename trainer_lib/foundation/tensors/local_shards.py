"""Sharded tensors: this rank's part as a plain tensor, and gradients that are split like their weights."""

from copy import copy
from typing import Any

import torch
from torch import Tensor


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor: of a weight that FSDP gathers in fp8, the values behind its wrapper."""
    local: Any = tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", tensor)
    if type(local) is Tensor or not hasattr(local, "fsdp_pre_all_gather"):
        return local
    names, _ = local.__tensor_flatten__()
    inner = getattr(local, names[0])
    return inner if (inner.shape, inner.dtype) == (local.shape, local.dtype) else local


def with_part(like: Any, part: Tensor, shape: torch.Size | None = None) -> Any:
    """Return a tensor that is split like another one, given this rank's part; a part of a plain tensor is all of it.

    Args:
        like: The other tensor.
        part: This rank's part.
        shape: The shape of the whole tensor; by default the other one's.

    Operations on a DTensor would return the same, but look up torch's rules of layouts for each new shape.
    """
    if not hasattr(like, "_local_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    spec = copy(like._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    if shape is not None and shape != like.shape:
        spec.tensor_meta = spec.tensor_meta._replace(shape=shape, stride=torch.empty(shape, device="meta").stride())
    # Not from_local, which moves a part that is kept in host memory to the device of the mesh.
    return DTensor(part, spec, requires_grad=False)


def laid_out(gradient: Any, weight: Any) -> Any:
    """Return a gradient split like its weight: a backward may leave it split otherwise, or summed only in part."""
    if not hasattr(weight, "_local_tensor") or gradient.placements == weight.placements:
        return gradient
    return gradient.redistribute(weight.device_mesh, weight.placements)
