"""Model weights alone: saved as Hugging Face's libraries read them, and loaded into a model."""

import json
import logging
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    StateError,
    UnsupportedError,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from trainer_lib.checkpointing.model_weights import load_checkpoint_in_model
from trainer_lib.utils import load, save
from trainer_lib.utils.modeling import get_state_dict_offloaded_model


def saved(folder: Path, **options: Any) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(toy.model(3))
    accelerator.save_model(model, folder, **options)
    return model


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for name, value in second.state_dict().items():
        assert torch.equal(first.state_dict()[name], value), name


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 300])
def test_what_was_saved_is_loaded(tmp_path: Path, safe: bool, size: Any) -> None:
    model = saved(tmp_path / "new" / "folder", max_shard_size=size, safe_serialization=safe)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path / "new" / "folder", strict=True)
    assert_same(loaded, model)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"device_map": {"": "cpu"}}])
def test_tied_weights_stay_apart_in_a_model_that_does_not_tie_them(options: dict[str, Any], tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    tied = nn.Sequential(first, nn.Linear(4, 4, bias=False))
    tied[1].weight = first.weight
    if "dtype" in options:
        tied.to(torch.bfloat16)
    Accelerator(cpu=True).save_model(tied, tmp_path)
    expected = first.weight.detach().clone()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), second)
    load_checkpoint_in_model(model, tmp_path, **options)
    assert all(torch.equal(weight, expected) for weight in model.parameters())
    with torch.no_grad():
        second.weight.zero_()
    assert torch.equal(next(model.parameters()), expected)


def test_files_and_indexes_are_loaded_too(tmp_path: Path) -> None:
    model = saved(tmp_path, max_shard_size=300)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, str(tmp_path / "model.safetensors.index.json"), strict=True)
    assert_same(loaded, model)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(loaded.get_parameter("2.weight"), model.get_parameter("2.weight"))
    assert torch.equal(loaded.get_parameter("0.weight"), toy.model().get_parameter("0.weight"))


def test_a_later_save_leaves_no_shards_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_1.safetensors").touch()
    saved(tmp_path, max_shard_size=300)
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    model = saved(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "model_1.safetensors"]
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path)
    assert_same(loaded, model)
    saved(tmp_path, max_shard_size=300)
    assert not (tmp_path / "model.safetensors").exists()
    saved(tmp_path, safe_serialization=False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model_1.safetensors", "pytorch_model.bin"]


def test_the_weights_in_a_state_are_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(toy.model(3))
    folder = accelerator.save_state(tmp_path / "state")
    loaded = toy.model()
    load_checkpoint_in_model(loaded, folder, strict=True)
    assert_same(loaded, model)


def test_transformers_reads_what_was_saved_and_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(model), tmp_path / "ours", max_shard_size="5KB")
    config.save_pretrained(tmp_path / "ours")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert_same(read, model)
    read.save_pretrained(tmp_path / "theirs")  # without the tied head
    with torch.device("meta"):
        loaded = transformers.GPT2LMHeadModel(config)
    load_checkpoint_in_model(loaded, tmp_path / "theirs", strict=True)
    assert_same(loaded, model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_type_can_be_asked_for(tmp_path: Path, device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    for dtype, kind in (("bfloat16", torch.bfloat16), (torch.float16, torch.float16), (None, torch.float32)):
        with torch.device(device):
            loaded = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        weight = loaded[0].weight
        load_checkpoint_in_model(loaded, tmp_path, dtype=dtype, strict=True)
        assert {value.dtype for value in loaded.state_dict().values()} == {kind, torch.int64}
        assert torch.equal(loaded.state_dict()["0.weight"], model.state_dict()["0.weight"].to(kind))
        assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
        # An optimizer that was made before still updates these parameters.
        assert device == "meta" or weight is loaded.get_parameter("0.weight")
    with pytest.raises(ConfigurationError, match="dtype='bf61' is not a torch dtype"):
        load_checkpoint_in_model(model, tmp_path, dtype="bf61")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("made_on", ["cpu", "meta"])
def test_one_device_can_be_asked_for(tmp_path: Path, device: Any, made_on: str) -> None:
    model = saved(tmp_path)
    with torch.device(made_on):
        loaded = toy.model(1)
    load_checkpoint_in_model(loaded, tmp_path, device_map={"": device}, strict=True)
    assert_same(loaded, model)


def test_the_device_asked_for_is_where_the_model_goes(tmp_path: Path) -> None:
    saved(tmp_path)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path, device_map={"": "meta"})
    assert {parameter.device.type for parameter in loaded.parameters()} == {"meta"}
    with pytest.raises(ConfigurationError, match="the device 'gpu', which torch does not know"):
        load_checkpoint_in_model(loaded, tmp_path, device_map={"": "gpu"})


def test_missing_and_unexpected_weights_are_logged_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    model = nn.Sequential(nn.Linear(8, 16), nn.PReLU())
    with pytest.raises(StateError, match=r"missing: 1.weight; not in this model: 2.bias, 2.weight"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, tmp_path)
    assert "does not have are unchanged: 1.weight." in caplog.text
    assert "that the model does not have: 2.bias, 2.weight." in caplog.text
    with pytest.raises(StateError, match=r"other shapes: 0.bias has the shape"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(8, 5)), tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_in_a_file_of_another_script_are_understood(tmp_path: Path, prefix: str) -> None:
    model, file = toy.model(3), tmp_path / "weights.pt"
    torch.save({f"{prefix}{name}": value for name, value in model.state_dict().items()}, file)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, file, strict=True)
    assert_same(loaded, model)
    inside = nn.Sequential()
    inside.add_module("module", toy.model())  # a part of that name is no wrapper
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, file)
    load_checkpoint_in_model(inside, file, strict=True)
    assert_same(inside.get_submodule("module"), model)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"0": "disk", "": "cpu"}], ids=str)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_of_wrappers_are_understood_with_a_device_map(
    tmp_path: Path, prefix: str, device_map: Any, ending: str
) -> None:
    model, file = toy.model(3), tmp_path / f"weights.{ending}"
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save(state, file) if ending == "bin" else save_file(state, file)
    expected = model(torch.ones(1, 8))
    with init_empty_weights():
        empty = toy.model()
    loaded = load_checkpoint_and_dispatch(empty, file, device_map, offload_folder=tmp_path / "disk", strict=True)
    assert torch.equal(loaded(torch.ones(1, 8)), expected)
    state = get_state_dict_offloaded_model(loaded)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_rank_0_reads_for_all(tmp_path: Path) -> None:
    model = saved(tmp_path / "weights", max_shard_size=500)
    (tmp_path / "other").mkdir()

    def body() -> Any:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        folder = tmp_path / ("weights" if rank == 0 else "nowhere")
        whole, empty = toy.model(seed=rank), toy.model().to("meta")
        for loaded in (whole, empty):
            load_checkpoint_in_model(loaded, folder, strict=True, broadcast_from_rank0=True)
        half = toy.model()
        load_checkpoint_in_model(half, folder, dtype="bfloat16", broadcast_from_rank0=True)
        errors: list[str] = []
        for wrong, place in ((nn.Linear(2, 2), folder), (toy.model(), tmp_path / "other")):
            try:
                load_checkpoint_in_model(wrong, place, strict=True, broadcast_from_rank0=True)
            except (StateError, CheckpointError) as error:
                errors.append(str(error))
        return [value.clone() for value in whole.parameters()], [*empty.parameters()], next(half.parameters()), errors

    expected = list(model.parameters())
    for whole, empty, half, errors in run_world(body):
        for found in (whole, empty):
            assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))
        assert torch.equal(half, expected[0].to(torch.bfloat16))
        assert "other" in errors[1]
        assert "not in this model" in errors[0]


def test_a_sharded_model_takes_its_parts_of_whole_weights(tmp_path: Path) -> None:
    model = saved(tmp_path, max_shard_size=500)

    def body() -> Any:
        from torch.distributed.fsdp import fully_shard

        Accelerator(cpu=True)
        whole: list[list[torch.Tensor]] = []
        for broadcast in (False, True):
            sharded: Any = fully_shard(toy.model(seed=4))
            load_checkpoint_in_model(sharded, tmp_path, strict=True, broadcast_from_rank0=broadcast)
            whole.append([parameter.full_tensor().detach() for parameter in sharded.parameters()])
        message = ""
        try:
            load_checkpoint_in_model(sharded, tmp_path, full_state_dict=False)
        except UnsupportedError as error:
            message = str(error)
        return whole, message

    for whole, message in run_world(body):
        for found in whole:
            assert all(torch.equal(value, other) for value, other in zip(found, model.parameters(), strict=True))
        assert "full_state_dict=False" in message


def test_a_broadcast_has_no_device_map(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"broadcast_from_rank0=True .* device_map"):
        load_checkpoint_in_model(toy.model(), tmp_path, device_map={"": "cpu"}, broadcast_from_rank0=True)


def test_a_map_cannot_be_inferred_where_nothing_is_dispatched(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"device_map='auto'\) needs a map .* load_checkpoint_and_dispatch"):
        load_checkpoint_in_model(toy.model(), tmp_path, device_map="auto")


def test_named_modules_keep_fp32(tmp_path: Path) -> None:
    saved(tmp_path)
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["2"], offload_state_dict=True)
    assert {name: parameter.dtype for name, parameter in loaded.named_parameters()} == {
        "0.weight": torch.bfloat16, "0.bias": torch.bfloat16, "2.weight": torch.float32, "2.bias": torch.float32,
    }  # fmt: skip


def test_a_path_that_is_not_a_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file, and weights are saved to a folder"):
        saved(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="'much' is not a size"):
        saved(tmp_path / "weights", max_shard_size="much")
    with pytest.raises(CheckpointError, match=r"the weights \(.*\) could not be written: .*Not a directory"):
        saved(tmp_path / "file" / "weights")
    with pytest.raises(CheckpointError, match="'weight' is on the meta device and has no values"):
        Accelerator(cpu=True).save_model(nn.Linear(2, 2, bias=False, device="meta"), tmp_path / "weights")


def test_extra_state_that_is_not_saved_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return "more"

    Accelerator(cpu=True).save_model(Extra(2, 2), tmp_path)
    assert "_extra_state are not tensors and are not saved with the weights" in caplog.text


def test_names_are_the_authors_whatever_wraps_the_model(tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(toy.model(3))
        accelerator.save_model(model, tmp_path)
        accelerator.save({"rank": torch.tensor(accelerator.process_index)}, tmp_path / "rank", safe_serialization=True)
        names = list(accelerator.get_state_dict(model)), list(accelerator.get_state_dict(model, unwrap=False))
        accelerator.wait_for_everyone()
        return names

    for canonical, wrapped in run_world(body, timeout=60):
        assert canonical == list(toy.model().state_dict())
        assert wrapped == [f"module.{name}" for name in canonical]
    loaded = toy.model()
    load_checkpoint_in_model(loaded, tmp_path, strict=True)
    assert_same(loaded, toy.model(3))


# -- any object ------------------------------------------------------------------------------------------------------


def test_objects_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    save({"seen": 7, "rows": torch.ones(2)}, path)
    assert load(path)["rows"].tolist() == [1, 1]
    save({"seen": 8}, str(path))
    assert load(path) == {"seen": 8}
    with path.open("wb") as file:
        save([1], file)
    assert load(path) == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["object.pt"]


def test_objects_that_could_run_code_are_loaded_on_request_only(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    save(Fraction(1, 2), path)  # exceptions are harmless from torch 2.14 on
    with pytest.raises(CheckpointError, match=r"holds more than tensors and plain values.*weights_only=False"):
        load(path)
    assert load(path, weights_only=False) == Fraction(1, 2)


def test_a_save_that_fails_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    save([1], path)
    with pytest.raises((AttributeError, pickle.PicklingError)):  # the second from Python 3.12 on
        save(lambda: 0, path)
    assert load(path) == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["object.pt"]


def test_safe_objects_are_dicts_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "object.safetensors"
    save({"a": torch.ones(2)}, path, safe_serialization=True)
    assert json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")["a"]["dtype"] == "F32"
    with pytest.raises(ConfigurationError, match=r"needs a dict of tensors \(got a dict with other values\)"):
        save({"a": 1}, path, safe_serialization=True)
    with pytest.raises(ConfigurationError, match=r"needs a path \(got an open file\)"), path.open("wb") as file:
        save({"a": torch.ones(1)}, file, safe_serialization=True)
