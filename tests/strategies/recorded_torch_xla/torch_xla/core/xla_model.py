"""Collectives and random generators."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import record  # noqa: TID252

REDUCE_SUM, REDUCE_MAX, REDUCE_MIN = "sum", "max", "min"
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(
    reduce_type: str, inputs: list[Tensor], scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> list[Tensor]:
    """Reduce a list of tensors in place."""
    assert isinstance(inputs, list)
    assert scale == 1
    assert groups is None
    assert pin_layout
    record("all_reduce", reduce_type=reduce_type, shapes=[list(each.shape) for each in inputs])
    for each in inputs:
        dist.all_reduce(each, _OPERATIONS[reduce_type])
    return inputs


def all_gather(value: Tensor, dim: int = 0, groups: Any = None, output: Any = None, pin_layout: bool = True) -> Tensor:
    """Return the tensors of all ranks, concatenated."""
    assert groups is output is None
    assert pin_layout
    record("all_gather", shape=list(value.shape))
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.contiguous())
    return torch.cat(gathered, dim)


def collective_broadcast(
    tensors: list[Tensor], root_ordinal: int = 0, groups: Any = None, pin_layout: bool = True
) -> None:
    """Multiply by 1 on one rank and 0 on others, and sum, in place."""
    assert groups is None
    assert pin_layout
    record("collective_broadcast", root=root_ordinal, shapes=[list(each.shape) for each in tensors])
    for each in tensors:
        each.mul_(1 if dist.get_rank() == root_ordinal else 0)
        dist.all_reduce(each)


def get_rng_state(device: Any = None) -> int:
    """Return a number that is large, as those of devices are."""
    assert device is None
    record("get_rng_state")
    return 2**64 - 7


def set_rng_state(seed: int, device: Any = None) -> None:
    """Do nothing."""
    assert device is None
    record("set_rng_state", seed=seed)
