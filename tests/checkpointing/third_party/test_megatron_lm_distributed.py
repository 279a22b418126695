"""Checkpoints of Megatron-LM in the format `torch_dist`, laid out as Megatron-LM core 0.16 writes them."""

import json
import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpointing.third_party.test_megatron_lm import MODELS, saved
from tests.strategies.split import model_of
from tests.worlds import run_world
from trainer_lib.checkpointing.third_party.megatron_lm.pieces import read_pieces
from trainer_lib.checkpointing.third_party.megatron_lm.weight_conversion import (
    Layout,
    from_transformers,
    to_transformers,
)
from trainer_lib.checkpointing.third_party.torch_shards import write_shards
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.state import PartialState

_OF_LAYER = re.compile(r"(\w+)\.layers\.(\d+)\.(.*)")


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as they are written by default: one tensor for all layers."""
    layers: dict[str, list[Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found = _OF_LAYER.fullmatch(name)
        if found is None:
            whole[name] = weight
        else:
            layers.setdefault(f"{found[1]}.layers.{found[3]}", []).append(weight)
    return whole | {name: torch.stack(parts) for name, parts in layers.items()}


def apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as `singleton_local_shards` writes them: layers and halves of a gated network by themselves."""
    halves: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("mlp.linear_fc1.weight"):
            halves[f"{name}_w"], halves[f"{name}_v"] = weight.chunk(2)
        else:
            halves[name] = weight
    return halves


def write(folder: Path, weights: dict[str, Tensor], arguments: dict[str, Any]) -> Path:
    """Write a checkpoint of iteration 7, its weights in shards of two ranks."""
    where = folder / "iter_0000007"

    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        PartialState(cpu=True)
        mesh = init_device_mesh("cpu", (2,))
        state: dict[str, Any] = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights.items()}
        state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
        state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = {"scale": 1.0}
        write_shards(where, state)

    run_world(body, num_processes=2)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    common = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 7, "content_metadata": {}}
    torch.save(common, where / "common.pt")
    (where / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    _add_plans(where / ".metadata")
    return folder


def _add_plans(path: Path) -> None:
    """Add what Megatron-LM's writers keep in the metadata: the plan of each rank."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    metadata = pickle.loads(path.read_bytes())
    size = torch.Size([2])
    data = TensorWriteData(ChunkStorageMetadata(size, size), TensorProperties(torch.float32), size)
    metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("a"), WriteItemType.SHARD, tensor_data=data)])]
    metadata.planner_data = None
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("llama", stacked), ("llama", apart), ("gpt2", stacked)])
def test_weights_come_back_bit_by_bit(name: str, layout: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = model_of(MODELS[name]).eval()
    from_transformers(saved(model, tmp_path / "source"), tmp_path / "megatron", Layout())
    weights, arguments, _ = read_pieces(tmp_path / "megatron" / "release")
    folder = write(tmp_path / "dist", layout(weights), dict(arguments))
    assert set(to_transformers(folder, tmp_path / "back")) == {"optimizer, schedule, generators"}
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.vocab_size == model.config.vocab_size
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@pytest.mark.slow
def test_what_is_wrong_with_a_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_transformers(saved(model_of(MODELS["llama"]), tmp_path / "source"), tmp_path / "megatron", Layout())
    weights, arguments, _ = read_pieces(tmp_path / "megatron" / "release")
    halves = apart(weights)
    halves.pop("decoder.layers.1.mlp.linear_fc1.weight_v")
    folder = write(tmp_path / "dist", halves, dict(arguments))
    where = folder / "iter_0000007"
    with pytest.raises(CheckpointError, match=r"has decoder.layers.1.mlp.linear_fc1.weight_w without its other half"):
        to_transformers(where, tmp_path / "back")  # the folder of the iteration itself
    torch.save({"args": Namespace(**arguments), "checkpoint_version": 2.0}, where / "common.pt")
    with pytest.raises(UnsupportedError, match=r"has checkpoint_version 2\.0"):
        to_transformers(folder, tmp_path / "back")
    torch.save({"model": {}}, where / "common.pt")
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "back")]) == 1
    assert "common.pt is no piece of a checkpoint of Megatron-LM: it has no args." in capsys.readouterr().err
    (where / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedError, match=r"has the format 'zarr'. Formats that are converted: torch, torch_dist"):
        to_transformers(folder, tmp_path / "back")
    (where / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"metadata\.json cannot be read .* the checkpoint is not complete"):
        to_transformers(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()
