"""Optimizers that update shards as plain tensors: the numbers of DTensors bit by bit, states that stay DTensors."""

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.strategies.sharded import Stack, stack
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.strategies.shard_updates import update_shards, updates_shards

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adam, many at once": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    "adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    "adamw, fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
    "radam": (torch.optim.RAdam, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "sgd, many at once": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd without a state": (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
}


class _Named(torch.optim.AdamW):
    pass


class _Other(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class _OtherAdafactor(torch.optim.Adafactor):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _trained(kind: type[Optimizer], options: dict[str, Any], as_shards: bool) -> tuple[list[Tensor], dict[Any, Tensor]]:
    model = _sharded()
    optimizer = kind(model.parameters(), **options)
    if as_shards:
        assert update_shards(optimizer)
    for step in range(3):
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        if step == 2:
            for weight in list(model.parameters())[::2]:
                weight.grad = None  # as of a layer that was not used
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.state) <= set(model.parameters())
    states = optimizer.state_dict()["state"]
    return list(model.parameters()), {(i, name): value for i, state in states.items() for name, value in state.items()}


def _both(kinds: dict[str, tuple[type[Optimizer], dict[str, Any]]]) -> list[str]:
    """Return which optimizers gave the same shards in both ways."""
    same: list[str] = []
    for name, (kind, options) in kinds.items():
        (weights, states), (expected, expected_states) = (_trained(kind, options, each) for each in (True, False))
        assert states.keys() == expected_states.keys()
        pairs = [*zip(weights, expected, strict=True), *((states[key], expected_states[key]) for key in states)]
        for value, other in pairs:
            assert getattr(value, "placements", None) == getattr(other, "placements", None)
            assert value.shape == other.shape
        local: Callable[[Any], Tensor] = lambda tensor: getattr(tensor, "_local_tensor", tensor)  # noqa: E731
        if all(torch.equal(local(value), local(other)) for value, other in pairs):
            same.append(name)
    return same


def test_each_optimizer_makes_the_updates_of_dtensors_bit_by_bit() -> None:
    assert run_world(_both, (KINDS,)) == [list(KINDS)] * 2


def _whole(kind: type[Optimizer], options: dict[str, Any], make: Callable[[], nn.Module]) -> list[Tensor]:
    """Return the weights after three updates in double precision: in single, `rsqrt` of some CPUs is an estimate."""
    torch.set_default_dtype(torch.float64)
    try:
        return _updated(kind, options, make())
    finally:
        torch.set_default_dtype(torch.float32)


def _updated(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> list[Tensor]:
    optimizer = kind(model.parameters(), **options)
    update_shards(optimizer)
    for step in range(3):
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights: list[Any] = list(model.parameters())
    return [weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach() for weight in weights]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Rprop, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.1, "foreach": True}),
    ],
    ids=["rprop", "sgd, fused", "adafactor", "adafactor, many at once"],
)
def test_optimizers_that_cannot_update_dtensors_update_shards(kind: type[Optimizer], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = _whole(kind, options, lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)))
    for weights in run_world(lambda: _whole(kind, options, _sharded)):
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def _layouts() -> tuple[Tensor, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    weight: Any = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([1.0, 2.0, 3.0]) * (1 + rank), mesh, [Partial()])
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    update_shards(optimizer)
    optimizer.step()
    return weight.to_local().detach(), optimizer.state[weight]["momentum_buffer"].to_local()


def test_gradients_that_are_split_otherwise_are_laid_out_like_their_weights() -> None:
    for weight, momentum in run_world(_layouts):
        torch.testing.assert_close(momentum, torch.tensor([3.0, 6.0, 9.0]), rtol=0, atol=0)
        torch.testing.assert_close(weight, torch.ones(3) - 0.1 * momentum)


def _after_an_error() -> bool:
    """Return whether an update after one that raised is that of an optimizer which nothing happened to."""
    weights: list[list[Tensor]] = []
    for raises in (True, False):
        model = _sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        update_shards(optimizer)
        model(torch.ones(2, 3)).square().sum().backward()
        if raises:
            functions = inspect.getmodule(torch.optim.SGD)
            with patch.object(functions, "sgd", side_effect=MemoryError), pytest.raises(MemoryError):
                optimizer.step()
        optimizer.step()
        optimizer.step()
        assert set(optimizer.state) == set(model.parameters())
        assert {type(state["momentum_buffer"]).__name__ for state in optimizer.state.values()} == {"DTensor"}
        weights.append([weight._local_tensor for weight in model.parameters()])  # type: ignore[attr-defined]
    return all(torch.equal(value, other) for value, other in zip(*weights, strict=True))


def test_an_update_that_raised_leaves_nothing_behind() -> None:
    assert run_world(_after_an_error) == [True, True]


def _types() -> list[bool]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="last"))
    network = stack()
    made = torch.optim.AdamW(network.parameters(), foreach=True)
    model, optimizer = accelerator.prepare(network, made)
    accelerator.backward(model(torch.ones(2, 8)).sum())
    functions = inspect.getmodule(torch.optim.Adam)
    with patch.object(functions, "adam", wraps=vars(functions)["adam"]) as update:
        optimizer.step()
    assert isinstance(network, Stack)
    assert {type(value).__name__ for value in optimizer.state[network.first.weight].values()} == {"Tensor", "DTensor"}
    return [type(tensor) in (Tensor, nn.Parameter) for values in update.call_args.args for tensor in values]


def test_a_prepared_optimizer_gets_plain_tensors() -> None:
    for plain in run_world(_types):
        assert len(plain) > 22 * 4
        assert all(plain)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(_Named, True), (_Other, False), (_OtherAdafactor, False), (torch.optim.Muon, False), (Optimizer, False)],
)
def test_optimizers_with_an_update_of_their_own_are_left_alone(kind: type[Optimizer], expected: bool) -> None:
    if kind is not Optimizer:
        construct: Any = kind
        made = construct([nn.Parameter(torch.ones(2, 2))])  # torch wraps the class's step now
        assert update_shards(made) is expected
        assert ("_init_group" in vars(made)) is expected
    assert updates_shards(kind) is expected
