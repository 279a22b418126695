"""Hooks around a module's forward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import Accelerator
from trainer_lib.big_modeling import attach_layerwise_casting_hooks
from trainer_lib.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Adds(ModelHook):
    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after = before, after

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.after

    def detach_hook(self, module: nn.Module) -> nn.Module:
        module.was_detached = True  # type: ignore[assignment]
        return module


def doubled() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2)
    return layer


ONE = torch.ones(1, 1)


def test_a_hook_runs_before_and_after_the_forward() -> None:
    layer = add_hook_to_module(doubled(), Adds(before=1, after=10))
    assert layer(ONE).item() == (1 + 1) * 2 + 10
    assert layer.forward.__name__ == "forward"


def test_a_second_hook_replaces_the_first_or_joins_it() -> None:
    layer = add_hook_to_module(doubled(), Adds(after=10))
    add_hook_to_module(layer, Adds(after=100))
    assert layer(ONE).item() == 102
    add_hook_to_module(layer, Adds(after=1000), append=True)
    assert layer(ONE).item() == 1102
    assert isinstance(layer._hf_hook, SequentialHook)


def test_a_removed_hook_leaves_the_module_as_before() -> None:
    layer = doubled()
    attributes = set(vars(layer))
    remove_hook_from_module(add_hook_to_module(layer, Adds(after=10)))
    assert layer(ONE).item() == 2
    assert layer.was_detached
    del layer.was_detached
    assert set(vars(layer)) == attributes
    layer.forward = lambda batch: batch * 5  # type: ignore[method-assign]
    remove_hook_from_module(add_hook_to_module(layer, Adds(after=10)))
    assert layer(ONE).item() == 5


def test_hooks_of_modules_inside_are_removed_too() -> None:
    model = nn.Sequential(add_hook_to_module(doubled(), Adds(after=10)), doubled())
    add_hook_to_module(model, Adds(after=1))
    assert model(ONE).item() == 25
    remove_hook_from_module(model)
    assert model(ONE).item() == 24
    remove_hook_from_submodules(model)
    assert model(ONE).item() == 4
    add_hook_to_module(model[0], Adds(after=10))
    assert remove_hook_from_module(model, recurse=True)(ONE).item() == 4


def test_a_copy_runs_its_own_weights() -> None:
    layer = add_hook_to_module(doubled(), Adds(after=10))
    twin: Any = copy.deepcopy(layer)
    nn.init.constant_(twin.weight, 3)
    assert (layer(ONE).item(), twin(ONE).item()) == (12, 13)


def test_a_hook_may_turn_off_gradients() -> None:
    class Frozen(ModelHook):
        no_grad = True

    layer = add_hook_to_module(doubled(), SequentialHook(ModelHook(), Frozen()))
    assert not layer(ONE).requires_grad
    assert remove_hook_from_module(layer)(ONE).requires_grad


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_hooked_model_can_be_prepared(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(add_hook_to_module(doubled(), Adds(after=10)))
    output = model(ONE)
    assert output.item() == 12
    assert output.dtype is torch.float32


def test_weights_are_stored_in_a_smaller_type() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.ModuleDict({"skipped": nn.Linear(4, 4)}), nn.Linear(4, 4)
    )
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model[2].forward = model[2]["skipped"]  # type: ignore[method-assign,index]
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern="skip")
    kinds = [model[0].weight.dtype, model[1].weight.dtype, model[2]["skipped"].weight.dtype, model[3].weight.dtype]  # type: ignore[index,union-attr]
    assert kinds == [torch.float8_e4m3fn, torch.float32, torch.float32, torch.float8_e4m3fn]
    model[0](torch.ones(1, 4, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]
    assert model[0].weight.dtype is torch.float8_e4m3fn
    other = nn.Sequential(nn.Linear(1, 1))
    attach_layerwise_casting_hooks(other, torch.bfloat16, torch.float32, skip_modules_classes=(nn.Linear,))
    assert other[0].weight.dtype is torch.float32
