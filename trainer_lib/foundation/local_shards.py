"""This rank's part of a sharded tensor, as a plain tensor."""

from typing import Any

from torch import Tensor


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor: of a weight that FSDP gathers in fp8, the values behind its wrapper."""
    local = getattr(tensor, "_local_tensor", tensor)
    if not hasattr(local, "fsdp_pre_all_gather"):
        return local
    names, _ = local.__tensor_flatten__()
    inner = getattr(local, names[0])
    return inner if (inner.shape, inner.dtype) == (local.shape, local.dtype) else local
