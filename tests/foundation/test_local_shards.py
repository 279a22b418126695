"""Sharded tensors that are made from a rank's part."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib.foundation.tensors.local_shards import laid_out, local_shard, with_part


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


def _made_of_another_shape() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    like: Any = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
    whole: Any = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    made = with_part(like, local_shard(whole), whole.shape)
    assert made._spec == whole._spec, "the shape and the strides too"
    gradient = with_part(like, torch.ones(4, 6))
    gradient._spec = type(like._spec)(mesh, (Partial(),), tensor_meta=like._spec.tensor_meta)
    summed: Any = laid_out(gradient, like)
    assert summed.placements == (Shard(0),)
    assert laid_out(like, like) is like
    assert laid_out(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]), like).placements == (Shard(0),)
    return [made.full_tensor(), whole.full_tensor(), summed.full_tensor(), torch.full((4, 6), 2.0)]


def test_a_tensor_has_another_shape_and_a_gradient_the_layout_of_its_weight() -> None:
    for made, expected, summed, ones in run_world(_made_of_another_shape):
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
        torch.testing.assert_close(summed, ones, rtol=0, atol=0)


class Gathered(Tensor):
    """A wrapper of values, as FSDP's of a weight that it gathers in fp8."""

    values_behind: Tensor

    def __new__(cls, values: Tensor, dtype: torch.dtype) -> "Gathered":
        """Say that it has the shape of the values."""
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype)
        made.values_behind = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the values."""
        return ["values_behind"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute nothing."""
        raise NotImplementedError

    def fsdp_pre_all_gather(self) -> None:
        """Have FSDP gather something else."""


def test_the_part_of_a_weight_is_the_values_behind_a_wrapper() -> None:
    values, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    assert local_shard(values) is values
    assert local_shard(weight) is weight
    assert local_shard(Gathered(values, torch.float32)) is values
    other = Gathered(values, torch.bfloat16)
    assert local_shard(other) is other, "the values are in another type"


def test_the_gradient_of_a_plain_weight_stays_as_it_is() -> None:
    gradient = torch.ones(2)
    assert laid_out(gradient, nn.Parameter(torch.zeros(2))) is gradient
