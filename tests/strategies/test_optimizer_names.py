"""An optimizer's state by names: it fits another order, another wrapper, and tells what does not fit."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import toy
from trainer_lib.foundation.errors import StateError
from trainer_lib.strategies.optimizer_state_names import load_named_state, named_state


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 2) -> Any:
    inputs, targets, _ = toy.data()
    for _ in range(steps):
        optimizer.zero_grad()
        toy.losses(model, inputs, targets).mean().backward()
        optimizer.step()
    return optimizer


def grouped(model: nn.Module, turned: bool) -> torch.optim.AdamW:
    """Return AdamW with two groups; turned, both the groups and what is in them are the other way round."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.5, "lr": 0.3}]
    if turned:
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    return torch.optim.AdamW(groups, lr=0.01)


def test_names_say_what_is_what() -> None:
    model = toy.model()
    state = named_state(stepped(torch.optim.AdamW(model.parameters()), model), [model])
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert state["state"]["2.bias"]["exp_avg"].shape == (3,)


def test_the_state_fits_another_order_of_groups_and_parameters() -> None:
    model, second = toy.model(), toy.model()
    first, two = stepped(grouped(model, False), model), grouped(second, True)
    second.load_state_dict(model.state_dict())
    load_named_state(two, [second], deepcopy(named_state(first, [model])))
    assert two.param_groups[0]["lr"] == 0.3
    stepped(first, model)
    stepped(two, second)
    for ours, its in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, its)


def test_groups_without_parameters_keep_their_own_settings() -> None:
    model = toy.model()
    optimizer = torch.optim.SGD([{"params": [], "lr": 0.1}, {"params": model.parameters()}, {"params": [], "lr": 0.2}])
    two = torch.optim.SGD([{"params": []}, {"params": model.parameters()}, {"params": []}], lr=9.0)
    load_named_state(two, [model], named_state(optimizer, [model]))
    assert [group["lr"] for group in two.param_groups] == [0.1, 0.001, 0.2]


def test_several_models_are_told_apart_and_own_parameters_are_counted() -> None:
    models = [toy.model(), toy.model()]
    scale = torch.ones(1, requires_grad=True)
    parameters: list[Tensor] = [scale, *models[1].parameters(), *models[0].parameters()]
    names = named_state(torch.optim.SGD(parameters), models)["param_groups"][0]["params"]
    assert names[:2] == ["parameter of its own 0", "1.0.weight"]
    assert names[5] == "0.0.weight"


def test_tied_parameters_have_their_first_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    state = named_state(torch.optim.SGD(model.parameters()), [model])
    assert state["param_groups"][0]["params"] == ["embedding.weight"]


def test_groups_of_named_parameters_keep_the_names_in_order() -> None:
    model, other = toy.model(), toy.model()
    original = torch.optim.SGD(model.named_parameters(), momentum=0.9)
    reversed_order = torch.optim.SGD(list(other.named_parameters())[::-1], momentum=0.9)
    load_named_state(reversed_order, [other], deepcopy(named_state(stepped(original, model), [model])))
    assert reversed_order.param_groups[0]["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    saved, loaded = (optimizer.state_dict()["state"] for optimizer in (original, reversed_order))
    for number in range(4):
        assert torch.equal(loaded[number]["momentum_buffer"], saved[3 - number]["momentum_buffer"])


def test_lbfgs_keeps_what_it_keeps_with_its_first_parameter() -> None:
    model, second = toy.model(), toy.model()
    inputs, targets, _ = toy.data()

    def closure(network: nn.Module) -> Any:
        network.zero_grad()
        loss = toy.losses(network, inputs, targets).mean()
        loss.backward()
        return loss

    first, two = torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS(second.parameters())
    first.step(lambda: closure(model))
    second.load_state_dict(model.state_dict())
    load_named_state(two, [second], deepcopy(named_state(first, [model])))
    first.step(lambda: closure(model))
    two.step(lambda: closure(second))
    for ours, its in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, its)


def test_other_groups_are_told() -> None:
    model = toy.model()
    state = named_state(torch.optim.SGD(model.parameters()), [model])
    with pytest.raises(StateError, match="has 1 parameter groups, and this AdamW has 2"):
        load_named_state(grouped(model, False), [model], state)
    part = torch.optim.SGD([*model[0].parameters(), torch.ones(1, requires_grad=True)])
    with pytest.raises(
        StateError,
        match=r"group 0 of SGD has the parameters of no saved group "
        r"\(new: parameter of its own 0; only saved: 2.weight, 2.bias\)",
    ):
        load_named_state(part, [model], state)
