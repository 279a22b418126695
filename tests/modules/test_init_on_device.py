"""Modules whose weights are on a chosen device, or have no memory, from the start."""

import pytest
import torch
from torch import nn

from trainer_lib.modules.init_on_device import init_empty_weights, init_on_device


@pytest.mark.parametrize("include_buffers", [None, False, True])
def test_weights_have_no_memory(include_buffers: bool | None) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = nn.BatchNorm1d(3)
    assert model.weight.device.type == "meta"
    assert isinstance(model.weight, nn.Parameter)
    assert model.running_var is not None
    assert model.running_var.device.type == ("meta" if include_buffers else "cpu")
    assert nn.BatchNorm1d(3).weight.device.type == "cpu", "only within the block"


def test_an_error_ends_the_block_too() -> None:
    with pytest.raises(KeyError), init_on_device(torch.device("meta")):
        raise KeyError
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    class Marked(nn.Parameter):
        pass

    weight = Marked(torch.ones(2), requires_grad=False)
    weight.axis = 1  # type: ignore[attr-defined]
    with init_empty_weights():
        module = nn.Module()
        module.register_parameter("weight", weight)
        module.register_parameter("bias", None)
    assert type(module.weight) is Marked
    assert module.weight.axis == 1  # type: ignore[union-attr]
    assert not module.weight.requires_grad
    assert module.bias is None
