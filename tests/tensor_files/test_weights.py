"""Weights in the layout of Hugging Face: one file, shards, and an index that cannot lead out of its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from trainer_lib.checkpointing.third_party.safe_pickles import read_pickle
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnsupportedError
from trainer_lib.tensor_files.weights_index import (
    files_of_weights,
    find_weights,
    load_state_dict,
    read_file_shapes,
    read_weights,
    weight_files,
)


def state() -> dict[str, Tensor]:
    """Return four tensors of 400 bytes, the last of them under a second name, and a larger one."""
    made: dict[str, Any] = {f"layer.{index}": torch.full((100,), float(index)) for index in range(4)}
    return {**made, "large": torch.ones(300), "head": made["layer.3"]}


def written(folder: Path, **options: Any) -> list[str]:
    files = weight_files(state(), **options)
    for name, content in files.items():
        content.write(folder / name)
    return list(files)


def names_in(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(torch.load(path, weights_only=True))
    with safe_open(path, "pt") as file:
        return list(file.keys())


def assert_same(actual: dict[str, Tensor]) -> None:
    assert set(actual) == set(state())
    assert all(torch.equal(actual[name], tensor) for name, tensor in state().items())
    assert actual["head"] is actual["layer.3"]


@pytest.mark.parametrize("safe", [True, False])
def test_one_file(tmp_path: Path, safe: bool) -> None:
    (name,) = written(tmp_path, max_shard_size="10GB", safe=safe)
    assert name == ("model.safetensors" if safe else "pytorch_model.bin")
    for checkpoint in (tmp_path, tmp_path / name):
        assert_same(read_weights(checkpoint))
    assert set(load_state_dict(tmp_path / name)) == set(state())
    assert find_weights(tmp_path, safe=safe) == tmp_path / name


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", [800, "0.8KB"])
def test_shards(tmp_path: Path, safe: bool, size: int | str) -> None:
    *shards, index = written(tmp_path, max_shard_size=size, safe=safe, index=2)
    stem, ending = ("model_2", "safetensors") if safe else ("pytorch_model_2", "bin")
    assert shards == [f"{stem}-{number:05d}-of-00003.{ending}" for number in (1, 2, 3)]
    assert index == f"{stem}.{ending}.index.json"
    content = json.loads((tmp_path / index).read_text())
    assert content["metadata"] == {"total_size": 2800}
    assert content["weight_map"]["layer.3"] == shards[1]
    assert content["weight_map"]["large"] == shards[2]
    # Converters compare the names of the index with those in the files.
    names = {name: shard for shard in shards for name in names_in(tmp_path / shard)}
    assert content["weight_map"] == names
    assert ("head" in names) != safe
    assert_same(read_weights(tmp_path / index))
    assert_same(read_weights(tmp_path))
    shapes = {name: shape for path in files_of_weights(tmp_path) for name, shape in read_file_shapes(path).items()}
    assert shapes == {name: (tensor.dtype, tensor.shape) for name, tensor in state().items()}


def test_transformers_reads_the_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    files = weight_files(model.state_dict(), max_shard_size="10KB")
    assert len(files) > 3
    for name, content in files.items():
        content.write(tmp_path / name)
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../outside.safetensors", "leads out of"),
        ("sub/../../outside.safetensors", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("C:\\outside", "leads out of"),
        ("link.safetensors", "a link out of"),
        ("folder/outside.safetensors", "a link out of"),
        (7, "which is not a valid name"),
        ("", "which is not a valid name"),
        ("gone.safetensors", "files that are missing: gone.safetensors"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: Any, reason: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    written(tmp_path, max_shard_size=10**6)
    (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "folder").symlink_to(tmp_path, target_is_directory=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=reason):
        read_weights(folder)


def test_links_within_a_folder_and_within_the_hugging_face_cache_are_fine(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1f", tmp_path / "models--x" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    *shards, _ = written(snapshot, max_shard_size=800)
    for shard in shards:
        (snapshot / shard).rename(blobs / shard)
        (snapshot / shard).symlink_to(Path("../../blobs") / shard)
    assert_same(read_weights(snapshot))


def test_a_folder_without_weights_raises(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"has no weights: neither model.safetensors.* It has notes.txt."):
        read_weights(tmp_path)
    with pytest.raises(CheckpointError, match="There is no file"):
        read_weights(tmp_path / "gone")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        files_of_weights(tmp_path)


def test_a_file_under_another_name_is_found_if_it_is_the_only_one(tmp_path: Path) -> None:
    written(tmp_path, max_shard_size="1GB")
    (tmp_path / "model.safetensors").rename(tmp_path / "diffusion.safetensors")
    assert_same(read_weights(tmp_path))
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(CheckpointError, match="has no weights"):
        read_weights(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "it ran",)

    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as a pickle of tensors only"):
        read_weights(tmp_path)
    torch.save({"epoch": 3, "state_dict": {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"Its 'state_dict' is one: model\.load_state_dict\(torch\.load\("):
        read_weights(tmp_path)
    torch.save(["no", "dict"], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold a dict of tensors"):
        read_weights(tmp_path)
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"version https://git-lfs.github.com/spec/v1", b"\x80\x02\x8a"])
def test_a_file_that_is_no_pickle_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    for read in (read_weights, lambda folder: read_pickle(folder / "pytorch_model.bin")):
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin (cannot be read|is refused).*: \S"):
            read(tmp_path)


def test_options_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigurationError, match="'much' is not a size"):
        weight_files(state(), max_shard_size="much")
    with pytest.raises(UnsupportedError, match="device_map"):
        load_state_dict("x", device_map="auto")


def test_an_index_may_be_the_map_itself(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"a": "one.safetensors"}')
    assert files_of_weights(tmp_path) == [tmp_path / "one.safetensors"]
