"""Files of tensors: safetensors reads them, tied tensors are stored once, and damage is reported."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.safetensors import _NAMES, read_shapes, read_tensors, unsupported_reason, write_tensors


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    grid = torch.randn(6, 4, generator=generator)
    return {
        **{str(dtype): (grid * 3).to(dtype) for dtype in _NAMES},
        "turned": grid.T,
        "part": grid[1:3, ::2],
        "repeated": torch.tensor([1.5]).expand(3),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "column of one row": grid[:1, 1],
        "column of no row": grid[:0, 1],
        "parameter": nn.Parameter(grid.clone()),
        "über.weight": torch.ones(1),
    }


def same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and bytes_of(first) == bytes_of(second)


def bytes_of(tensor: Tensor) -> list[int]:
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.cat([values, values]).view(torch.uint8).tolist()


def test_the_path_of_a_file_may_be_no_valid_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    write_tensors({"a": torch.ones(2)}, path)
    assert read_shapes(path) == {"a": (torch.float32, torch.Size([2]))}
    assert read_tensors(path)["a"].tolist() == [1, 1]
    path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_tensors(path)


@pytest.mark.parametrize("read", [read_tensors, safetensors.torch.load_file])
def test_every_kind_of_tensor_comes_back_bitwise(tmp_path: Path, read: Any) -> None:
    write_tensors(tensors(), tmp_path / "file")
    tensors_read = read(tmp_path / "file")
    assert set(tensors_read) == set(tensors())
    for name, tensor in tensors().items():
        assert same(tensors_read[name], tensor), name


def test_shapes_are_known_without_reading_the_tensors(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path / "file")
    assert read_shapes(tmp_path / "file") == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors().items()}


def test_each_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    assert size % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors().items())


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path: Path) -> None:
    weight = torch.arange(100.0)
    tied = {"embedding": weight, "head": weight, "other": weight.clone(), "same memory": weight.view(10, 10)}
    write_tensors(tied, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 3 * weight.nbytes + 500
    with safetensors.safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt", "head": "embedding"}
    result = read_tensors(tmp_path / "file")
    assert result["head"] is result["embedding"]
    assert result["other"] is not result["embedding"]
    assert torch.equal(result["same memory"], weight.view(10, 10))
    assert read_shapes(tmp_path / "file")["head"] == (torch.float32, torch.Size([100]))


def test_what_the_formats_own_library_ties_is_tied_here(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    safetensors.torch.save_model(model, str(tmp_path / "file"))
    assert set(read_tensors(tmp_path / "file")) == {"embedding.weight", "head.weight"}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(2, device="meta"), "'it' is on the meta device and has no values"),
        (torch.eye(2).to_sparse(), "'it' is not a dense tensor"),
        (torch.zeros(2, dtype=torch.complex128), "'it' has the dtype torch.complex128"),
        (nn.UninitializedParameter(), "'it' is a UninitializedParameter"),
    ],
)
def test_what_has_no_plain_values_is_refused_by_name(tmp_path: Path, tensor: Tensor, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        write_tensors({"it": tensor}, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_not_dense() -> None:
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)])
    assert unsupported_reason(nested) == "is not a dense tensor"


@pytest.mark.parametrize("read", [read_tensors, read_shapes])
@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 40, b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_not_safetensors_raises(tmp_path: Path, read: Any, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="file cannot be read as safetensors"):
        read(tmp_path / "file")


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="file cannot be read as safetensors"):
        read_tensors(tmp_path / "file")
