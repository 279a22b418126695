"""Single tensors that move between devices, and device maps."""

from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import ConfigurationError
from trainer_lib.modules.device_placement import (
    align_module_device,
    check_device_map,
    check_device_same,
    check_tied_parameters_on_same_device,
    clean_device_map,
    has_offloaded_params,
    set_module_tensor_to_device,
)

META = torch.device("meta")


def test_a_tensor_gets_a_device_a_value_and_a_type() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)).to(META)
    model[0].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.tensor([[1.0, 2.0]]))
    assert torch.equal(model[0].weight, torch.tensor([[1.0, 2.0]]))
    assert not model[0].weight.requires_grad
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].bias.device == META
    set_module_tensor_to_device(model, "0.bias", "cpu", value=torch.ones(1), dtype="bfloat16")
    assert model[0].bias.dtype is torch.bfloat16
    assert model[0].bias.requires_grad
    set_module_tensor_to_device(model, "1.num_batches_tracked", "cpu", value=torch.tensor(7), dtype=torch.float16)
    assert model[1].num_batches_tracked.dtype is torch.int64, "whole numbers keep their type"
    assert int(model[1].num_batches_tracked) == 7
    set_module_tensor_to_device(model, "0.weight", META)
    assert model[0].weight.device == META


def test_a_value_is_converted_to_the_type_of_the_tensor() -> None:
    layer = nn.Linear(2, 1).half()
    set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(1))
    assert layer.bias.dtype is torch.float16


def test_a_tied_tensor_becomes_the_copy_that_is_there() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    value = first.weight.data
    tied: Any = {value.data_ptr(): {}}
    set_module_tensor_to_device(first, "weight", "cpu", value=value, dtype=torch.float16, tied_params_map=tied)
    (copy,) = tied[value.data_ptr()].values()
    assert first.weight.data_ptr() == copy.data_ptr()
    set_module_tensor_to_device(second, "weight", "cpu", value=value, tied_params_map=tied)
    assert second.weight.data_ptr() == copy.data_ptr()


def test_errors_name_the_tensor() -> None:
    layer = nn.Linear(2, 1, device=META)
    with pytest.raises(ConfigurationError, match=r"weight is on the meta device and has no value. Give value="):
        set_module_tensor_to_device(layer, "weight", "cpu")
    with pytest.raises(ConfigurationError, match=r"bias has the shape \(1,\), and value has \(2,\)"):
        set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(2))
    with pytest.raises(ConfigurationError, match=r"Linear has no parameter or buffer 'wieght'.*Did you mean 'weight'"):
        set_module_tensor_to_device(layer, "wieght", "cpu")
    with pytest.raises(ConfigurationError, match="is not a torch dtype"):
        set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(1), dtype="fp17")
    with pytest.raises(ConfigurationError, match="fp16_statistics"):
        set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(1), fp16_statistics=torch.ones(1).half())


def test_a_module_is_aligned_within_a_block() -> None:
    layer = nn.Linear(2, 1)
    weight = layer.weight
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with align_module_device(layer, device):
        assert layer.weight.device.type == device.type
        layer.weight.data.fill_(3)
    assert layer.weight is weight
    assert torch.equal(weight, torch.full((1, 2), 3.0)), "on the CPU again, with its new value"
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"


def test_devices_that_are_the_same() -> None:
    assert check_device_same(torch.device("cpu"), torch.device("cpu", 0))
    assert not check_device_same(torch.device("cpu"), META)


def test_offloading_hooks_are_seen() -> None:
    layer: Any = nn.Linear(1, 1)
    assert not has_offloaded_params(layer)
    layer._hf_hook = type("Hook", (), {"offload": True})()
    assert has_offloaded_params(layer)


def test_a_device_map_covers_the_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    check_device_map(model, {"": 0})
    check_device_map(model, {"0": 0, "1.weight": 1, "1.bias": "cpu"})
    with pytest.raises(ConfigurationError, match=r"names no device for 1.bias. Add them"):
        check_device_map(model, {"0": 0, "1.weight": 0})


def test_a_device_map_is_cleaned() -> None:
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 1}) == {"a": 0, "d": 1}
    assert clean_device_map({"a.b.x": 0, "a.b.y": 0, "a.c": 1}) == {"a.b": 0, "a.c": 1}
    assert clean_device_map({"a": 0, "b": 0}) == {"": 0}
    assert clean_device_map({"a.x": 0, "ab": 1, "a.y": 0}) == {"a": 0, "ab": 1}


def test_tied_tensors_on_several_devices() -> None:
    groups = [["a.weight", "b.weight"], ["a.bias", "a.other"]]
    assert check_tied_parameters_on_same_device(groups, {"a": 0, "b": 1}) == [["a.weight", "b.weight"]]
    assert check_tied_parameters_on_same_device(groups, {"": 0, "b": 0}) == []
