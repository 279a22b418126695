"""Sharded tensors that are made from a rank's part."""

from typing import Any

import torch

from tests.worlds import run_world
from trainer_lib.foundation.tensors.local_shards import local_shard, with_part


def _made() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    like: Any = distribute_tensor(torch.arange(15.0).view(5, 3).bfloat16(), init_device_mesh("cpu", (2,)), [Shard(0)])
    made = with_part(like, local_shard(like).float())
    assert (made.dtype, made.shape, made.placements) == (torch.float32, like.shape, like.placements)
    assert made._spec == like.float()._spec, "what the rules of layouts look at"
    assert like.dtype is torch.bfloat16, "the other tensor's facts are its own"
    return [made.full_tensor(), like.float().full_tensor()]


def test_a_tensor_is_split_like_another_one_of_another_type() -> None:
    for made, expected in run_world(_made):
        torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_a_part_of_a_plain_tensor_is_all_of_it() -> None:
    part = torch.ones(2)
    assert with_part(torch.zeros(2), part) is part
