"""Limits with which the fullest accelerator holds as little as possible."""

from itertools import combinations

import pytest
from torch import nn

from trainer_lib.device_map.balance import get_balanced_memory
from trainer_lib.device_map.infer import plan_device_map
from trainer_lib.utils import get_max_memory


def model_of(widths: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


@pytest.mark.parametrize(
    "widths", [(5, 5, 5, 5, 5, 5), (9, 1, 1, 1, 1), (1, 2, 3, 4, 5, 6, 7), (7, 3), (4, 9, 2, 8, 1)]
)
@pytest.mark.parametrize("devices", [2, 3])
def test_the_fullest_holds_as_little_as_possible(widths: tuple[int, ...], devices: int) -> None:
    model = model_of(widths)
    limits = get_balanced_memory(model, dict.fromkeys(range(devices), 1000))
    cuts = combinations(range(len(widths) + 1), devices - 1)
    least = min(
        max(sum(widths[start:end]) for start, end in zip((0, *cut), (*cut, len(widths)), strict=True))
        for cut in map(sorted, cuts)
    )
    loads = plan_device_map(model, limits).loads
    assert max(load.used for load in loads) == 4 * least
    assert loads[-1].used == 0  # nothing on the disk


def test_the_last_keeps_its_limit_so_that_a_slightly_larger_model_stays_on_the_accelerators() -> None:
    limits = get_balanced_memory(model_of((5, 5, 5, 5)), {0: 1000, 1: 1000, "cpu": 1000})
    assert limits == {0: 40, 1: 1000, "cpu": 1000}
    assert set(plan_device_map(model_of((5, 5, 5, 6)), limits).placement.values()) == {0, 1}


def test_as_little_as_possible_on_the_first() -> None:
    model = model_of((5, 5, 5, 5))
    assert get_balanced_memory(model, {0: 1000, 1: 1000, 2: 1000}, low_zero=True) == {0: 0, 1: 40, 2: 1000}
    assert get_balanced_memory(model, {0: 1000, 1: 20, 2: 25}, low_zero=True) == {0: 40, 1: 20, 2: 25}


def test_limits_below_the_size_of_the_model_stay() -> None:
    assert get_balanced_memory(model_of((5, 5)), {0: 10, 1: 20, "cpu": 100}) == {0: 10, 1: 20, "cpu": 100}


def test_limits_of_other_devices_and_unused_accelerators_stay() -> None:
    memory = {0: 100, 1: 0, 2: 100, "cpu": 50}
    assert get_balanced_memory(model_of((5, 5)), memory) == {0: 20, 1: 0, 2: 100, "cpu": 50}


def test_without_accelerators_all_free_memory_counts() -> None:
    assert get_balanced_memory(model_of((5,)), {"cpu": 100}) == {"cpu": 100}
    assert get_balanced_memory(model_of((5,))).keys() == get_max_memory().keys()
