"""Where each layer of a model goes: limits are kept to the byte, and the whole model has a place."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import init_empty_weights
from trainer_lib.device_map.infer import infer_auto_device_map, plan_device_map
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.device_placement import check_device_map

LAYER = 4 * (10 * 10 + 10)  # the bytes of a linear layer of 10 × 10


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(count)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.register_buffer("mask", torch.ones(10), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 10)
        self.body = layers(2)
        self.head = nn.Linear(10, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_a_model_that_just_fits_is_on_one_device() -> None:
    assert infer_auto_device_map(layers(3), {0: 3 * LAYER, 1: 3 * LAYER}) == {"": 0}


def test_devices_are_filled_in_their_order_to_the_byte() -> None:
    assert infer_auto_device_map(layers(4), {0: 2 * LAYER, "cpu": 2 * LAYER - 1}) != {"0": 0, "1": 0, "2": "cpu"}
    assert infer_auto_device_map(layers(4), {0: 2 * LAYER, 1: 2 * LAYER}) == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert infer_auto_device_map(layers(4), {0: 2 * LAYER - 1, 1: 3 * LAYER}) == {"0": 0, "1": 1, "2": 1, "3": 1}


def test_offloaded_layers_have_room_for_two_where_they_run() -> None:
    plan = plan_device_map(layers(6), {0: 4 * LAYER, "cpu": LAYER})
    assert dict(plan.placement) == {"0": 0, "1": 0, "2": "cpu", "3": "disk", "4": "disk", "5": "disk"}
    assert [(load.used, load.reserved) for load in plan.loads] == [(2 * LAYER, 2 * LAYER), (LAYER, 0), (3 * LAYER, 0)]


def test_offloaded_layers_run_on_the_first_device_that_may_hold_any() -> None:
    plan = plan_device_map(layers(6), {0: 0, 1: 4 * LAYER, "cpu": LAYER})
    assert dict(plan.placement) == {"0": 1, "1": 1, "2": "cpu", "3": "disk", "4": "disk", "5": "disk"}
    assert [load.reserved for load in plan.loads] == [0, 2 * LAYER, 0, 0]


def test_without_accelerators_layers_on_the_disk_run_in_the_memory_of_the_host() -> None:
    plan = plan_device_map(layers(5), {"cpu": 3 * LAYER})
    assert dict(plan.placement) == {"0": "cpu", "1": "disk", "2": "disk", "3": "disk", "4": "disk"}
    assert plan.loads[0].reserved == 2 * LAYER


def test_parameters_of_the_root_count() -> None:
    block = Block()
    assert plan_device_map(block, {0: 2 * LAYER + 80}).loads[0].used == 2 * LAYER + 80
    assert infer_auto_device_map(block, {0: 2 * LAYER + 80}) == {"": 0}
    assert infer_auto_device_map(block, {0: LAYER + 80, 1: LAYER}) == {"scale": 0, "mask": 0, "first": 0, "second": 1}


@pytest.mark.parametrize("classes", [["Block"], "Block", [Block], Block])
def test_a_module_that_must_not_be_split_moves_as_a_whole(classes: object) -> None:
    model = nn.Sequential(Block(), Block())
    size = 2 * LAYER + 80
    assert infer_auto_device_map(model, {0: size + LAYER + 80, 1: size})["1.first"] == 0
    assert infer_auto_device_map(model, {0: size + LAYER + 80, 1: size}, classes) == {"0": 0, "1": 1}  # type: ignore[arg-type]


def test_tied_weights_count_once_and_stay_together() -> None:
    embedding = 50 * 10 * 4
    plan = plan_device_map(Tied(), {0: embedding + LAYER, 1: 5000})
    assert dict(plan.placement) == {"embedding": 0, "head": 0, "body.0": 0, "body.1": 1}
    assert plan.loads[0].used == embedding + LAYER


def test_tied_weights_that_do_not_fit_together_are_copied_to_a_second_device() -> None:
    model = Tied()
    model.head.bias = nn.Parameter(torch.zeros(50))
    embedding = 50 * 10 * 4
    plan = plan_device_map(model, {0: embedding, 1: 5000})
    assert plan.placement["head"] == 1
    assert plan.loads[1].used == 2 * LAYER + embedding + 200


def test_a_module_with_two_names_has_a_place_under_both() -> None:
    shared = nn.Linear(10, 10)
    model = nn.ModuleDict({"one": shared, "body": layers(1), "two": shared})
    device_map = infer_auto_device_map(model, {0: LAYER, 1: LAYER})
    assert device_map == {"one": 0, "two": 0, "body.0": 1}
    check_device_map(model, device_map)


def test_types_decide_the_sizes() -> None:
    model = layers(2)
    assert infer_auto_device_map(model, {0: LAYER}, dtype="float16") == {"": 0}
    assert infer_auto_device_map(model, {0: LAYER + LAYER // 2}, dtype=torch.float16, special_dtypes={
        "1.weight": torch.float32, "1.bias": torch.float32}) == {"": 0}  # fmt: skip
    assert infer_auto_device_map(model, {0: LAYER}) != {"": 0}


def test_buffers_of_offloaded_layers_stay_where_these_run_unless_they_are_offloaded_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(100), nn.BatchNorm1d(100), nn.BatchNorm1d(100))
    parameters, buffers = 2 * 400, 2 * 400 + 8
    kept = plan_device_map(model, {"cpu": 2 * parameters + 3 * buffers})
    assert (kept.loads[0].reserved, kept.loads[0].used) == (2 * parameters + 3 * buffers, 0)
    moved = plan_device_map(model, {"cpu": 2 * (parameters + buffers)}, offload_buffers=True)
    assert set(moved.placement.values()) == {"disk"}
    assert moved.loads[0].reserved == 2 * (parameters + buffers)


def test_a_later_layer_can_take_a_device_on_which_the_next_one_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 10))
    large = 4 * (100 * 100 + 100)
    assert infer_auto_device_map(model, {0: LAYER, 1: large + LAYER}) == {"": 1}
    assert infer_auto_device_map(model, {0: LAYER, 1: large + LAYER}, fallback_allocation=True) == {"1": 0, "0": 1}


def test_the_plan_says_what_did_not_fit_and_why() -> None:
    text = str(plan_device_map(layers(3), {0: "1000", 1: "1000"}))
    assert text.splitlines() == [
        "device  holds      of          reserved  modules",
        "0       880 bytes  1000 bytes            0, 1",
        "1       440 bytes  1000 bytes            2",
        "2 (440 bytes) does not fit on 0, where 120 bytes are free.",
    ]
    assert str(plan_device_map(layers(3), {"cpu": 2 * LAYER})).splitlines()[2:4] == [
        "disk    1.29 KB                        0, 1, 2",
        "0 (440 bytes) does not fit on cpu, where 0 bytes are free.",
    ]


def test_what_is_too_large_to_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    infer_auto_device_map(layers(2), {"cpu": LAYER})
    assert "Offloaded layers need 880 bytes on cpu while they run, and max_memory allows 440." in caplog.text


def test_verbose_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(layers(1), {"cpu": "1MB"}, verbose=True)
    assert capsys.readouterr().out.startswith("device  holds")


def test_without_cleaning_each_layer_has_an_entry() -> None:
    assert infer_auto_device_map(layers(2), {0: "1MB"}, clean_result=False) == {"0": 0, "1": 0}


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"gpu": "1MB"}, "the device 'gpu'"),
        ({0: "a lot"}, "a lot"),
        ({True: "1MB"}, "the device True"),
        ({"cpu": 0, "disk": 100}, "no room for 0 (440 bytes), on the disk either"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(memory: dict[object, object], words: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        infer_auto_device_map(layers(1), memory)  # type: ignore[arg-type]
    assert words in str(refusal.value)


def test_classes_that_the_model_does_not_have_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    infer_auto_device_map(model, {"cpu": 100}, no_split_module_classes=["LlamaDecoderLayer", "Linear"])
    assert caplog.text == ""
    infer_auto_device_map(model, {"cpu": 100}, no_split_module_classes=["Lineer"])
    assert "the Sequential has no module of the class Lineer. Did you mean 'Linear'?" in caplog.text


def test_classes_must_be_names_or_classes() -> None:
    with pytest.raises(ConfigurationError, match="names of classes or classes"):
        infer_auto_device_map(layers(1), {"cpu": 1000}, [3])  # type: ignore[list-item]


@pytest.mark.parametrize("seed", range(30))
def test_limits_hold_for_any_model(seed: int) -> None:
    """What a device holds, counted from its tensors, stays within its limit; everything has a place."""
    chance = random.Random(seed)
    with init_empty_weights():
        parts = [Block() if chance.random() < 0.4 else nn.Linear(chance.randint(1, 40), 10) for _ in range(12)]
        model = nn.Sequential(*parts, Tied() if seed % 2 else nn.BatchNorm1d(30))
    memory = {device: chance.randint(0, 9000) for device in (0, 1, "cpu")}
    plan = plan_device_map(model, memory, ["Block"] if seed % 3 else None)
    check_device_map(model, dict(plan.placement))
    for load in plan.loads[:-1]:
        held = dict[int, int]()
        for name in load.modules:
            owner, _, last = name.rpartition(".")
            part = getattr(model.get_submodule(owner), last)
            tensors = [part] if isinstance(part, torch.Tensor) else [*part.parameters()]
            if isinstance(part, nn.Module) and load.device != "cpu":
                tensors += part.buffers()
            held |= {id(tensor): tensor.nbytes for tensor in tensors if load.device != "cpu" or tensor.requires_grad}
        assert sum(held.values()) == load.used <= memory[load.device]
        if load.reserved and not plan.too_large:
            assert load.used + load.reserved <= memory[load.device]


@pytest.mark.parametrize("max_memory", ["1GB", ["1GB"], 1000])
def test_limits_that_are_no_dict_are_refused(max_memory: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_memory must be a dict of limits by device"):
        infer_auto_device_map(nn.Linear(2, 2), max_memory)


@pytest.mark.parametrize("limit", ["lots", "1 XB", "-1GB", "", -1, float("nan"), None])
def test_limits_that_are_no_sizes_are_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a size. Give bytes as a number"):
        infer_auto_device_map(nn.Linear(2, 2), {"cpu": limit})
