"""Accelerate's single steps of inferring a device map."""

import pytest
import torch
from torch import nn

from trainer_lib import ConfigurationError, cpu_offload
from trainer_lib.utils.modeling import (
    compute_module_sizes,
    fallback_allocate,
    find_tied_parameters,
    get_module_size_with_ties,
    get_state_dict_from_offload,
)


class Block(nn.Sequential):
    pass


def model() -> nn.Sequential:
    """Return three modules of 440, 440 and 220 bytes."""
    return nn.Sequential(Block(nn.Linear(10, 10)), nn.Sequential(nn.Linear(10, 10), nn.ReLU()), nn.Linear(10, 5))


def test_the_first_module_that_fits_is_taken() -> None:
    made = model()
    modules, sizes = list(made.named_children()), compute_module_sizes(made)
    assert sizes["0"] == 440
    name, module, rest = fallback_allocate(modules, sizes, 440)
    assert (name, module, [n for n, _ in rest]) == ("0", made[0], ["1", "2"])
    name, module, rest = fallback_allocate(modules, sizes, 439)
    assert (name, module, [n for n, _ in rest]) == ("2", made[2], ["0", "1"])
    # A layer is not split; nothing fits.
    assert fallback_allocate(modules, sizes, 200) == (None, None, modules)


def test_modules_are_split_unless_they_stay_whole() -> None:
    made = nn.Sequential(Block(nn.Linear(10, 10), nn.Linear(10, 5)), nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)))
    modules, sizes = list(made.named_children()), compute_module_sizes(made)
    name, module, rest = fallback_allocate(modules, sizes, "220")
    assert (name, module, [n for n, _ in rest]) == ("0.1", made[0][1], ["0.0", "1"])  # type: ignore[index]
    name, _, rest = fallback_allocate(modules, sizes, 220, ["Block"])
    assert (name, [n for n, _ in rest]) == ("1.1", ["0", "1.0"])


def test_modules_that_share_parameters_count_together() -> None:
    made = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    made[2].weight = made[0].weight
    modules, sizes = list(made.named_children()), compute_module_sizes(made)
    sizes["2.weight"], sizes["2"] = 400, 440
    tied = find_tied_parameters(made)
    assert get_module_size_with_ties(["2.weight"], 400, sizes, modules[1:]) == (440, ["2"], [made[2]])
    assert get_module_size_with_ties([], 400, sizes, modules) == (400, [], [])
    assert fallback_allocate(modules, sizes, 400, tied_parameters=tied)[0] is None
    assert fallback_allocate(modules, sizes, 400)[0] == "0"
    assert fallback_allocate(modules, sizes, 440, tied_parameters=tied)[0] == "0"
    with pytest.raises(ConfigurationError, match=r"No module in modules_to_treat has 2.weight"):
        get_module_size_with_ties(["2.weight"], 400, sizes, modules[:2])


def test_the_state_of_one_offloaded_module_is_read() -> None:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = {name: value.clone() for name, value in made.state_dict().items()}
    cpu_offload(made)
    state = made.state_dict()
    assert get_state_dict_from_offload(made[1], "1.weight", state) is state
    assert torch.equal(state["1.weight"], expected["1.weight"])
    assert torch.equal(state["1.bias"], expected["1.bias"])
    assert state["0.weight"].device.type == "meta"
    whole = nn.Linear(2, 2)
    assert get_state_dict_from_offload(whole, "weight", {"weight": None, "other": 1})["weight"] is not None
