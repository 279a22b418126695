import os
from pathlib import Path

import pytest
import torch

from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files import load_tensors as loading
from trainer_lib.tensor_files.load_tensors import load_tensors
from trainer_lib.tensor_files.safetensors import read_tensors, write_tensors


def test_what_is_loaded_is_what_lies_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PIECE", 100)  # so that tensors are read in pieces, the last one shorter
    shared = torch.randn(7, 9)
    tensors = {
        "shared": shared,
        "alias": shared,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "half": torch.randn(33).bfloat16(),
        "flags": torch.tensor([True, False, True]),
    }
    write_tensors(tensors, tmp_path / "x.safetensors", {"beside": "a text"})

    loaded = load_tensors(tmp_path / "x.safetensors")

    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert loaded["alias"] is loaded["shared"]


@pytest.mark.parametrize(("piece", "most"), [(100, 512), (1 << 20, 2), (1 << 20, 512)])
def test_a_file_is_loaded_and_hashed_in_one_pass(
    piece: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shared = tmp_path / "x.safetensors", torch.randn(7, 9)
    tensors = {"a": shared, "b": shared, "half": torch.randn(33).bfloat16(), "flag": torch.tensor(True)}
    written = write_tensors(tensors, path, {"beside": "a text"})
    monkeypatch.setattr(loading, "_PIECE", piece)
    monkeypatch.setattr(loading, "_MOST_MEMORIES", most)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, memories, at: preadv(file, [memories[0][:70]], at))  # reads less

    loaded, checksum = loading.load_with_checksum(path)

    assert checksum == written == checksum_of(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded["a"] is loaded["b"]


def test_the_checksum_of_a_file_without_values_is_that_of_its_header(tmp_path: Path) -> None:
    written = write_tensors({"none": torch.empty(0, 3)}, tmp_path / "x.safetensors")
    loaded, checksum = loading.load_with_checksum(tmp_path / "x.safetensors")
    assert (loaded["none"].shape, checksum) == ((0, 3), written)


def test_what_is_loaded_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors({"a": torch.ones(1000)}, path)
    loaded = load_tensors(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded["a"], torch.ones(1000))


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:length])
    for read in (load_tensors, read_tensors):
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            read(path)
