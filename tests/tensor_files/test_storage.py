"""Which tensors are aliases, and which share storage."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer_lib import Accelerator, CheckpointError
from trainer_lib.tensor_files.finite_check import nonfinite_tensors
from trainer_lib.tensor_files.tensor_storage import (
    bytes_of,
    clean_state_dict_for_safetensors,
    id_tensor_storage,
    without_aliases,
)


def test_the_first_of_equal_views_is_kept() -> None:
    weight = torch.ones(4, 4)
    state = {"a": weight, "b": weight, "c": weight[:2], "d": weight.clone(), "e": weight[:2]}
    kept, aliases = without_aliases(state)
    assert list(kept) == ["a", "c", "d"]
    assert aliases == {"b": "a", "e": "c"}


def test_conjugates_are_no_aliases() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    state = {"a": values, "b": values.conj(), "c": values.conj().imag, "d": values.imag}
    kept, aliases = without_aliases(state)
    assert list(kept) == ["a", "b", "c", "d"]
    assert aliases == {}
    assert nonfinite_tensors({**state, "e": (values / 0).conj().imag}) == {"e": "inf"}
    read = safetensors.torch.load(safetensors.torch.save(clean_state_dict_for_safetensors(state)))
    assert all(torch.equal(read[name], value) for name, value in state.items())


def test_what_has_no_memory_is_never_one() -> None:
    state = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.empty(2, device="meta"),
        "d": torch.empty(2, device="meta"),
    }
    assert list(without_aliases(state)[0]) == ["a", "b", "c", "d"]


def test_a_cleaned_state_dict_can_be_saved_by_the_formats_own_library() -> None:
    weight = torch.arange(16.0).view(4, 4)
    state = {"a": weight, "b": weight, "half": weight[:2], "turned": weight.T}
    cleaned = clean_state_dict_for_safetensors(state)
    read = safetensors.torch.load(safetensors.torch.save(cleaned))
    assert list(cleaned) == ["a", "half", "turned"]
    assert all(torch.equal(read[name], state[name]) for name in cleaned)


def test_memory_has_an_identity() -> None:
    weight = torch.ones(4)
    assert id_tensor_storage(weight) == id_tensor_storage(weight[1:]) != id_tensor_storage(weight.clone())
    assert id_tensor_storage(weight)[2] == 16
    meta = torch.empty(4, device="meta")
    assert id_tensor_storage(meta) == (torch.device("meta"), 0, 16)


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda matrix: matrix.to_sparse(),
    "csr": lambda matrix: matrix.to_sparse_csr(),
    "csc": lambda matrix: matrix.to_sparse_csc(),
    "bsr": lambda matrix: matrix.to_sparse_bsr((2, 2)),
    "bsc": lambda matrix: matrix.to_sparse_bsc((2, 2)),
}
# Of 4 × 4 with two values: 2 × 2 indices; 5 or 3 rows of offsets and 2 or 1 columns; each of 8 bytes, values of 4.
BYTES = {"coo": 32 + 8, "csr": 40 + 16 + 8, "csc": 40 + 16 + 8, "bsr": 24 + 8 + 16, "bsc": 24 + 8 + 16}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # of PyTorch 2.15
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_buffer_is_pickled_on_request_and_refused_with_advice(layout: str, tmp_path: Any) -> None:
    matrix = torch.zeros(4, 4)
    matrix[0, 1], matrix[1, 0] = 2.0, math.inf
    sparse = SPARSE[layout](matrix)
    assert bytes_of(sparse) == BYTES[layout]
    assert nonfinite_tensors({"edges": sparse, "none": SPARSE[layout](torch.eye(4))}) == {"edges": "inf"}
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    model.register_buffer("edges", sparse)
    model = accelerator.prepare(model)
    with pytest.raises(CheckpointError, match=r"'edges' is not a dense tensor.* save with safe_serialization=False"):
        accelerator.save_state(tmp_path / "refused")
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    model.edges = SPARSE[layout]((matrix != 0).float())  # torch copies compressed ones between equal structures alone
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.edges.to_dense(), matrix)
