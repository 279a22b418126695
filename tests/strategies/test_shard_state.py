"""States of sharded models: whole ones that one process can load, shards, and what does not fit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.strategies.sharded import Stack, Tied, stack
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, StateError
from trainer_lib.strategies.fsdp.materialize import replace

Optimizers = Callable[[Any], torch.optim.Optimizer]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    decays = [p for p in parameters if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": decays, "lr": 1e-2}, {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}],
        lr=2e-2,
    )


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class _Run:
    """A model in training, whose states can be taken and loaded."""

    def __init__(
        self,
        shards: bool,
        kind: Callable[[], nn.Module] = Stack,
        optimizer: Optimizers = _adamw,
        plugin: dict[str, Any] | None = None,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**(plugin or {})) if shards else None
        )
        network = stack(kind)
        self.network, self.optimizer = self.accelerator.prepare(network, optimizer(list(network.parameters())))

    def train(self, first: int, last: int) -> None:
        inputs, targets, _ = toy.data()
        accelerator = self.accelerator
        size = 8 // accelerator.num_processes
        for step in range(first, last):
            rows = slice(
                step * 8 + size * accelerator.process_index, step * 8 + size * accelerator.process_index + size
            )
            accelerator.backward(toy.losses(self.network, inputs[rows], targets[rows]).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self, whole: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = self.accelerator.strategy
        return strategy.model_state(self.network, whole=whole), strategy.optimizer_state(
            self.optimizer, [self.network], whole=whole
        )

    def load(self, model: Any, optimizer: Any) -> None:
        self.accelerator.strategy.load_model_state(self.network, model)
        self.accelerator.strategy.load_optimizer_state(self.optimizer, [self.network], optimizer)

    def end(self) -> dict[str, Any]:
        model, _ = self.state()
        self.accelerator.free_memory()
        return model


KINDS: dict[str, tuple[Callable[[], nn.Module], Optimizers, dict[str, Any]]] = {
    "groups": (Stack, _adamw, {}),
    "fused": (Stack, _fused, {}),
    "momentum": (Stack, _momentum, {"ignored_modules": "last"}),
    "tied": (Tied, _adamw, {}),
    "offload": (Stack, _adamw, {"cpu_offload": True}),
    "checkpointed": (Stack, _adamw, {"activation_checkpointing": True}),
}


def _first_half(names: list[str], shards: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in names:
        run = _Run(shards, *KINDS[name])
        run.train(0, 2)
        facts[name] = run.state()
        run.end()
    return facts


def _second_half(shards: bool, states: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, state in states.items():
        run = _Run(shards, *KINDS[name])
        if run.accelerator.is_main_process:
            run.load(*copy.deepcopy(state))  # torch's optimizers keep the tensors that they load
        else:
            run.load({}, {})
        run.train(2, 4)
        facts[name] = run.end()
    return facts


def _second_halves(*states: dict[str, Any]) -> list[dict[str, Any]]:
    return [_second_half(True, each) for each in states]


def _uninterrupted(names: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in names:
        kind, optimizer, _ = KINDS[name]
        run = _Run(False, kind, optimizer)
        run.train(0, 4)
        facts[name] = run.end()
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["groups"], id="groups"),
        pytest.param([name for name in KINDS if name != "groups"], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_world(names: list[str]) -> None:
    expected = _uninterrupted(names)
    alone = _first_half(names, shards=False)
    main, other = run_world(_first_half, (names, True), 2, timeout=60)
    assert all(state == ({}, {}) for state in other.values())
    for name, (weights, optimizer) in main.items():
        assert list(weights) == list(alone[name][0])
        assert optimizer.keys() == alone[name][1].keys()
        assert all(value.device.type == "cpu" and type(value) is torch.Tensor for value in weights.values())
    from_one, from_two = run_world(_second_halves, (alone, main), 2, timeout=60)[0]
    ways = {"two, then one": _second_half(False, main), "one, then two": from_one, "two, then two": from_two}
    for way, facts in ways.items():
        for name, weights in expected.items():
            assert list(facts[name]) == list(weights), (way, name)
            toy.assert_same(list(facts[name].values()), list(weights.values()), rtol=1e-4)


def _from_shards() -> Any:
    run = _Run(True)
    run.train(0, 2)
    model, optimizer = run.state(whole=False)
    assert model["first.weight"].shape == (10, 8)
    assert model["first.weight"].to_local().shape == (5, 8), "a shard"
    kept = {name: value.clone() for name, value in model.items()}
    parts = {name: {key: value.clone() for key, value in values.items()} for name, values in optimizer["state"].items()}
    run.train(2, 4)
    once, _ = run.state()
    run.load(kept, {**optimizer, "state": parts})
    run.train(2, 4)
    return once, run.end()


def test_shards_are_taken_up_where_they_were() -> None:
    (once, again), _ = run_world(_from_shards, (), 2, timeout=60)
    toy.assert_same(list(again.values()), list(once.values()), rtol=0)


def _saved_over(folder: Path) -> list[str]:
    """Save shards, and whole weights to the same folder, which are loaded."""
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        run = _Run(True, plugin={"state_dict_type": kind})
        run.train(0, 1)
        run.accelerator.save_state(folder)
        run.accelerator.load_state(folder)
        run.end()
    return sorted(path.name for path in folder.glob("model*"))


def test_whole_weights_replace_shards_of_an_older_checkpoint(tmp_path: Path) -> None:
    names, _ = run_world(_saved_over, (tmp_path / "state",), 2, timeout=60)
    assert names == ["model.safetensors"]


def _from_other_shards() -> Any:
    """Load shards that are laid out otherwise than those of the model: each rank holds all of them."""
    from torch.distributed.tensor import Replicate

    run = _Run(True)
    whole, _ = run.state()
    shards, _ = run.state(whole=False)
    otherwise = {
        name: value.redistribute(placements=[Replicate()]) if hasattr(value, "redistribute") else value.clone()
        for name, value in shards.items()
    }
    run.train(0, 1)
    run.accelerator.strategy.load_model_state(run.network, otherwise)
    return whole, run.end()


def test_shards_of_another_layout_are_loaded() -> None:
    (once, again), _ = run_world(_from_other_shards, (), 2, timeout=60)
    toy.assert_same(list(again.values()), list(once.values()), rtol=0)


def _factors(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def _from_whole_factors() -> Any:
    run = _Run(True, optimizer=_factors)
    run.train(0, 2)
    model, optimizer = copy.deepcopy(run.state())
    run.train(2, 4)
    once, again = run.end(), _Run(True, optimizer=_factors)
    again.load(model, optimizer)
    again.train(2, 4)
    return once, again.end()


def test_states_of_another_shape_than_their_weights_are_loaded() -> None:
    """Adafactor keeps a row and a column for a matrix."""
    (once, again), _ = run_world(_from_whole_factors, (), 2, timeout=60)
    toy.assert_same(list(again.values()), list(once.values()), rtol=0)


def _after_evaluation() -> list[bool]:
    """Load while a forward that nothing followed has left weights whole."""
    run = _Run(True, plugin={"reshard_after_forward": False})
    whole, _ = run.state()
    run.network(toy.data()[0])
    changed = {name: value * 2 for name, value in whole.items()}
    run.accelerator.strategy.load_model_state(run.network, changed)
    outputs = run.network(toy.data()[0])
    reference = stack()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
    return [torch.allclose(outputs, reference(toy.data()[0]), rtol=1e-5)]


def test_loaded_weights_are_those_that_compute() -> None:
    assert run_world(_after_evaluation, (), 2, timeout=60) == [[True], [True]]


def _refused() -> list[str]:
    run = _Run(True)
    model, optimizer = run.state()
    messages: list[str] = []

    def attempt(change: Callable[[dict[str, Any], dict[str, Any]], None], strict: bool = True) -> None:
        changed, settings = dict(model), dict(optimizer)
        if run.accelerator.is_main_process:
            change(changed, settings)
        try:
            run.accelerator.strategy.load_model_state(run.network, changed, strict)
            run.accelerator.strategy.load_optimizer_state(run.optimizer, [run.network], settings)
        except StateError as error:
            messages.append(str(error))
        else:
            messages.append("loaded")

    def lose_a_group(weights: Any, settings: Any) -> None:
        del weights
        settings["param_groups"] = settings["param_groups"][1:]

    attempt(lambda weights, settings: weights.pop("scale"))
    attempt(lambda weights, settings: weights.pop("scale"), strict=False)
    attempt(lambda weights, settings: weights.update(more=torch.ones(1)))
    attempt(lambda weights, settings: weights.update({"last.bias": torch.ones(2)}))
    attempt(lose_a_group)
    return messages


def test_states_of_another_model_are_refused_on_all_processes() -> None:
    for result in run_world(_refused, (), 2, timeout=60):
        for text, words in zip(
            result, ["missing: scale", "loaded", "more", "last.bias has the shape", "1 para"], strict=True
        ):
            assert words in text


def _loaded_by_torch(plugin: dict[str, Any]) -> list[bool]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    whole = {name: value + 1.5 for name, value in stack(Tied).state_dict().items()}
    network: Any = accelerator.prepare(stack(Tied))
    result = network.load_state_dict(whole)
    gathered = accelerator.get_state_dict(network)
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        network.load_state_dict({**whole, "scale": torch.ones(2)})
    accelerator.free_memory()
    same = all(torch.equal(value, whole[name]) for name, value in gathered.items())
    return [not result.missing_keys, not result.unexpected_keys, same]


@pytest.mark.parametrize("plugin", [{}, {"activation_checkpointing": True}, {"cpu_offload": True}])
def test_a_sharded_model_takes_whole_weights_from_torch(plugin: dict[str, Any]) -> None:
    assert run_world(_loaded_by_torch, (plugin,), 2, timeout=60) == [[True] * 3] * 2


class _WithExtra(nn.Linear):
    """A layer that saves more than its tensors."""

    note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _extra() -> list[str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    network: Any = accelerator.prepare(nn.Sequential(_WithExtra(2, 2)))
    state = accelerator.strategy.model_state(network)
    if accelerator.is_main_process:
        state["0._extra_state"] = {"note": "loaded"}
    accelerator.strategy.load_model_state(network, state)
    return [network[0].note]


def test_extra_states_travel_too() -> None:
    assert run_world(_extra, (), 2, timeout=60) == [["loaded"], ["loaded"]]


def test_a_parameter_is_replaced_under_all_of_its_names() -> None:
    network: Any = Tied()
    new = nn.Parameter(torch.zeros_like(network.first.weight))
    replace(network, {network.first.weight: new})
    assert network.first.weight is new
    assert network.last.weight is new


class _Counting(torch.optim.SGD):
    """Counts its steps in a tensor of the group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", torch.zeros(())) + 1
        return super().step(closure)


def test_tensors_in_groups_are_loaded_from_shards(tmp_path: Path) -> None:
    def body() -> Any:
        run = _Run(True, optimizer=lambda parameters: _Counting(parameters, lr=1e-2, momentum=0.9))
        run.train(0, 2)
        run.accelerator.save_state(tmp_path / "state")
        run.train(2, 3)
        run.accelerator.load_state(tmp_path / "state")
        return run.optimizer.param_groups[0]["steps"]

    assert run_world(body, num_processes=2) == [torch.tensor(2.0)] * 2
