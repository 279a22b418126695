"""Tensors that are mapped from files: where, and that nothing else differs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer_lib import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.load_tensors import load_tensor, locate_tensor
from trainer_lib.tensor_files.map_tensor import map_or_read, map_tensor
from trainer_lib.tensor_files.safetensors import write_tensors


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the memory of a tensor is a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(str(path))
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64])
def test_values_are_those_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    tensors = {f"{size}": (torch.randn(size, 3) * 50).to(dtype) for size in (1, 7, 64)}
    write_tensors({**tensors, "scalar": torch.tensor(2.0), "nothing": torch.empty(0, 4)}, path)
    for name, tensor in {**tensors, "scalar": torch.tensor(2.0), "nothing": torch.empty(0, 4)}.items():
        found = map_or_read(path, locate_tensor(path, name), is_read_now=name == "7")
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_files_of_this_library_are_aligned_so_that_they_are_mapped(tmp_path: Path) -> None:
    for length in range(1, 40):
        write_tensors({"a" * length: torch.ones(64, 16)}, tmp_path / "weights")
        found = map_or_read(tmp_path / "weights", locate_tensor(tmp_path / "weights", "a" * length))
        assert found.data_ptr() % 64 == 0
        assert is_mapped(found, tmp_path / "weights")


def test_fp32_is_mapped_only_where_products_are_those_of_memory(tmp_path: Path) -> None:
    kinds = set[tuple[torch.dtype, bool]]()
    vector = torch.randn(1, 129)
    for length in range(1, 65):
        for dtype in (torch.float32, torch.bfloat16):
            path, weight = tmp_path / f"{length} {dtype}", torch.randn(257, 129).to(dtype)
            save_file({"a" * length: weight}, path)
            location = locate_tensor(path, "a" * length)
            found = map_or_read(path, location)
            assert is_mapped(found, path) == (dtype == torch.bfloat16 or location.start % 64 == 0)
            assert torch.equal(vector.to(dtype) @ found.T, vector.to(dtype) @ weight.T)
            kinds.add((dtype, is_mapped(found, path)))
    assert kinds == {(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)}


def test_changes_are_private_and_the_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_tensors({"a": torch.ones(4096)}, path)
    found = map_tensor(path, *locate_tensor(path, "a"))
    found[0] = 5
    write_tensors({"a": torch.zeros(4096)}, tmp_path / "new")
    (tmp_path / "new").replace(path)
    assert found.sum() == 4095 + 5
    path.unlink()
    assert found[1] == 1


def test_a_file_that_is_too_short_or_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="short cannot be read"):
        map_tensor(tmp_path / "short", torch.float32, (1024,))
    with pytest.raises(CheckpointError, match="none cannot be read"):
        map_tensor(tmp_path / "none", torch.float32, (1,))
    with pytest.raises(CheckpointError, match="none cannot be read"):
        locate_tensor(tmp_path / "none", "a")


def test_a_dispatched_model_takes_no_memory_for_what_is_mapped(tmp_path: Path) -> None:
    whole = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8))
    Accelerator(cpu=True).save_model(whole, tmp_path)
    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8))
    load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    (mapped, *_), (saved, *_) = model.parameters(), whole.parameters()
    assert is_mapped(mapped, tmp_path / "model.safetensors")
    batch = torch.randn(1, 1024)
    assert torch.equal(model(batch), whole(batch))
    model(batch).sum().backward()  # and it trains, in memory of its own
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(load_tensor(tmp_path / "model.safetensors", "0.weight"), saved)
    assert not torch.equal(mapped, saved)
