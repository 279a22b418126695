"""Sizes of tensors and modules, against numbers counted by hand."""

import pytest
import torch
from torch import nn

from trainer_lib import ConfigurationError
from trainer_lib.modules.weights.tensor_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
    named_module_tensors,
)
from trainer_lib.options.enums import CustomDtype


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)  # 24 + 12 bytes
        self.norm = nn.BatchNorm1d(3)  # 4 tensors of 12 bytes, and a whole number of 8
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)


def test_bytes_of_a_value() -> None:
    sizes = {torch.float32: 4, torch.bfloat16: 2, torch.int64: 8, torch.float8_e4m3fn: 1, torch.bool: 0.125}
    assert {dtype: dtype_byte_size(dtype) for dtype in sizes} == sizes
    assert [dtype_byte_size(kind) for kind in (CustomDtype.FP8, CustomDtype.INT4, CustomDtype.INT2)] == [1, 0.5, 0.25]
    with pytest.raises(ConfigurationError, match=r"must be a torch.dtype such as torch.float32 \(got 'fp16'\)"):
        dtype_byte_size("fp16")  # type: ignore[arg-type]


def test_sizes_of_modules_add_up() -> None:
    sizes = compute_module_sizes(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert (sizes[""], sizes["0"], sizes["0.weight"], sizes["1"], sizes["1.num_batches_tracked"]) == (92, 36, 24, 56, 8)
    assert compute_module_sizes(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), buffers_only=True)[""] == 32


def test_sizes_in_another_type_leave_whole_numbers_and_smaller_types() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert compute_module_sizes(model, torch.float16)[""] == 18 + 24 + 8
    assert compute_module_sizes(model, "torch.float64")[""] == 92
    assert compute_module_sizes(model, special_dtypes={"0.weight": torch.float64})[""] == 92 + 24
    assert compute_module_total_buffer_size(model, "float16") == 12 + 8
    assert compute_module_total_buffer_size(nn.Linear(1, 1)) == 0
    with pytest.raises(ConfigurationError, match="'half-ish' is not a torch dtype"):
        compute_module_sizes(model, "half-ish")


def test_a_shared_tensor_counts_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert compute_module_sizes(model)[""] == 32


def test_tensors_and_buffers_that_a_state_dict_lacks() -> None:
    model = nn.ModuleDict({"block": Block()})
    assert [name for name, _ in named_module_tensors(model)] == []
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"mask"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"block.mask"}
    names = {name for name, _ in named_module_tensors(model, recurse=True)}
    assert names == {*model.state_dict(), "block.mask"}
    assert {name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)} == {
        *model.state_dict()
    }
    assert "block.norm.running_mean" not in dict(named_module_tensors(model, include_buffers=False, recurse=True))


def test_the_largest_layer() -> None:
    model = nn.Sequential(Block(), nn.Linear(2, 3))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(model.named_children(), sizes, []) == (56, ["0.norm"])
    assert get_max_layer_size(model.named_children(), sizes, ["Block"]) == (92, ["0"])
    assert calculate_maximum_sizes(model) == (92 + 36, (56, ["0.norm"]))
    assert get_module_leaves(compute_module_sizes(model[1])) == ["weight", "bias"]
