"""Norms over whole and sharded gradients, of any kind, beside torch's over whole ones."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.strategies import clip_grad_norm

NORMS = [2.0, 1.0, 3.0, 0.5, 0.0, float("inf"), -float("inf")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    importlib.import_module("torch.distributed.tensor")


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((5, 3), (1, 4), (2,), (8, 2))]
    tensors[0][0] = 0.0
    return [*tensors, torch.zeros(2, 2)]


def _parameters(sharded: set[int]) -> list[Any]:
    """Return parameters with gradients, some of them in shards, of which some are empty on some processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = PartialState(cpu=True).num_processes
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    parameters: list[Any] = []
    for index, tensor in enumerate(_tensors()):
        placed: Any = distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) if index in sharded else tensor
        parameters.append(nn.Parameter(placed))
        parameters[-1].grad = placed.clone()
    return [*parameters, nn.Parameter(torch.ones(2))]


def _all(sharded: set[int]) -> list[Any]:
    values: list[Any] = []
    for norm_type in NORMS:
        parameters = _parameters(sharded)
        before = clip_grad_norm.total_grad_norm(parameters, norm_type, CPU)
        clipped = clip_grad_norm.clip_norm(parameters, 0.7, norm_type, CPU)
        values.append((before, clipped, [_whole(p.grad) for p in parameters[:-1]]))
    parameters = _parameters(sharded)
    clip_grad_norm.clamp_gradients(parameters, 0.3)
    return [values, [_whole(p.grad) for p in parameters[:-1]]]


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), -float("inf")])
def test_the_norm_of_gradients_of_which_one_rank_has_nan_is_nan(norm_type: float) -> None:
    def norms() -> list[bool]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        state, found = PartialState(cpu=True), list[bool]()
        mesh = init_device_mesh("cpu", (2,))
        for bad in range(2):
            parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
            local = torch.ones(2) * (float("nan") if state.process_index == bad else 1.0)
            parameter.grad = DTensor.from_local(local, mesh, [Shard(0)])
            found.append(bool(clip_grad_norm.total_grad_norm([parameter], norm_type, CPU).isnan()))
        return found

    assert run_world(norms, (), 2) == [[True, True]] * 2


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def test_norms_and_clipping_are_those_of_whole_gradients() -> None:
    expected: list[Any] = []
    for norm_type in NORMS:
        parameters = [nn.Parameter(tensor) for tensor in _tensors()]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        total = torch.nn.utils.clip_grad_norm_(parameters, 0.7, norm_type)
        expected.append((total, [p.grad for p in parameters]))

    def all_kinds() -> list[Any]:
        return [_all(sharded) for sharded in (set(range(5)), {0, 2, 3}, {1})]

    for result in run_world(all_kinds, (), 4, timeout=60):
        for norms, cut in result:
            for (before, clipped, clipped_gradients), (total, theirs) in zip(norms, expected, strict=True):
                assert type(before) is Tensor
                torch.testing.assert_close(before, total, rtol=1e-6, atol=0)
                torch.testing.assert_close(clipped, before, rtol=0, atol=0)
                torch.testing.assert_close(clipped_gradients, theirs, rtol=2e-6, atol=1e-7)
            torch.testing.assert_close(cut, [tensor.clamp(-0.3, 0.3) for tensor in _tensors()], rtol=0, atol=0)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm.total_grad_norm([nn.Parameter(torch.ones(2))], 2.0, CPU) == 0
    assert clip_grad_norm.clip_norm([], 1.0, 2.0, CPU) == 0


def test_powers_that_a_float_cannot_hold() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 1e-5)
    small = clip_grad_norm.total_grad_norm([parameter], 2.0, CPU)
    assert float(small) == pytest.approx(3**0.5 * 1e-5, rel=1e-6)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtypes", [[torch.float32] * 5, [torch.float32, torch.bfloat16] * 2 + [torch.float32], []])
def test_whole_gradients_are_clipped_as_by_torch_to_the_last_digit(norm_type: float, dtypes: list[torch.dtype]) -> None:
    def clipped(clip: Any) -> list[Tensor]:
        parameters = [nn.Parameter(tensor.to(dtype)) for tensor, dtype in zip(_tensors(), dtypes, strict=False)]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        parameters.append(nn.Parameter(torch.ones(2)))  # without a gradient
        norm = clip(iter(parameters), 0.7, norm_type)
        return [norm, *(parameter.grad for parameter in parameters if parameter.grad is not None)]

    ours, theirs = clipped(clip_grad_norm.clip_whole), clipped(nn.utils.clip_grad_norm_)
    assert all(torch.equal(first, second) for first, second in zip(ours, theirs, strict=True))
