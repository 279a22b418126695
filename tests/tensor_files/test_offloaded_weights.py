"""Weights in files of a folder, in the layout of Accelerate."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer_lib import CheckpointError, ConfigurationError, disk_offload
from trainer_lib.checkpointing.load.offloaded_model import load_offloaded_weights
from trainer_lib.tensor_files.offloaded_weights import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

STATE = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "eighth": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "wide": torch.tensor([0.5, -2.0]).to(torch.float8_e5m2),
    "complex": torch.tensor([[1 + 2j], [3 - 1j]]).T,
    "empty": torch.zeros(0, 3),
    "column of one row": torch.ones(4, 2)[:1, 1],
}


def test_a_state_dict_comes_back_from_its_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new", STATE)
    loaded = dict(OffloadedWeightsLoader(save_folder=tmp_path / "new"))
    assert set(loaded) == set(STATE)
    index = json.loads((tmp_path / "new" / "index.json").read_text())
    for name, tensor in STATE.items():
        alone = load_offloaded_weight(tmp_path / "new" / f"{name}.dat", index[name])
        assert loaded[name].dtype is alone.dtype is tensor.dtype
        for value in (loaded[name], alone):
            assert torch.equal(value.to(torch.complex128), tensor.to(torch.complex128))
            assert value.shape == tensor.shape


def test_a_model_finds_its_weights_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    expected = model(torch.ones(1, 3))
    monkeypatch.chdir(tmp_path)
    disk_offload(model, "weights")
    monkeypatch.chdir("/")
    assert torch.equal(model(torch.ones(1, 3)), expected)


def test_the_layout_is_accelerates(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, STATE)
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", *(f"{name}.dat" for name in STATE)}
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["half"] == {"dtype": "bfloat16", "shape": [2]}
    assert index["steps"] == {"dtype": "int64", "shape": []}
    assert (tmp_path / "half.dat").read_bytes() == STATE["half"].view(torch.int16).numpy().tobytes()


def test_an_index_grows(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(1), "first", tmp_path)
    save_offload_index(index, tmp_path)
    save_offload_index(offload_weight(torch.zeros(1), "second", tmp_path), tmp_path)
    save_offload_index({}, tmp_path)
    assert offload_weight(torch.ones(1), "third", tmp_path, index) is index
    assert list(index) == ["first", "third"]
    assert list(json.loads((tmp_path / "index.json").read_text())) == ["first", "second"]
    assert torch.equal(load_offloaded_weight(tmp_path / "second.dat", index["first"]), torch.zeros(1))


def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leads out of"):
        offload_weight(torch.ones(1), "../outside", tmp_path)


def test_tensors_in_memory_come_first_and_safetensors_are_read(tmp_path: Path) -> None:
    save_file({"inner": torch.ones(2)}, tmp_path / "model.safetensors")
    file = str(tmp_path / "model.safetensors")
    loader = OffloadedWeightsLoader(
        state_dict={"mine": torch.zeros(1)},
        index={
            "theirs": {"safetensors_file": file, "weight_name": "inner", "dtype": "float16"},
            "mine": {"safetensors_file": "gone"},
        },
    )
    assert list(loader) == ["mine", "theirs"]
    assert len(loader) == 2
    assert torch.equal(loader["mine"], torch.zeros(1))
    assert torch.equal(loader["theirs"], torch.ones(2, dtype=torch.float16))
    assert loader["theirs"].dtype is torch.float16
    with pytest.raises(KeyError):
        loader["other"]


def test_there_is_something_to_load_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Give state_dict, save_folder or index"):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointError, match="is not an index of offloaded weights"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_keys_behind_a_prefix() -> None:
    prefixed = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert dict(prefixed) == {"x": 1, "y": 2}
    assert len(prefixed) == 2


def test_tensors_of_submodules() -> None:
    state = {"a.x": 1, "a": 2, "ab.x": 3, "c.x": 4}
    assert extract_submodules_state_dict(state, ["a", "c"]) == {"a.x": 1, "a": 2, "c.x": 4}  # type: ignore[arg-type]


def test_weights_go_from_a_folder_into_a_model(tmp_path: Path) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1, device="meta")
    offload_state_dict(tmp_path, source.state_dict())
    load_offloaded_weights(target, None, tmp_path)
    assert target.weight.device.type == "meta"
    load_offloaded_weights(target, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)
