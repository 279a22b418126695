"""`trainer-lib plan`: simulated ranks against the memory of real ones, and what a user types and reads."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig, UnsupportedError
from trainer_lib.commands.main import main
from trainer_lib.commands.plan.simulated_rank import simulate
from trainer_lib.modules.example_inputs import example_forward
from trainer_lib.modules.training_memory import local_part
from trainer_lib.utils import FullyShardedDataParallelPlugin

SIZES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate_size": 4},
    "fsdp": {"dp_shard_size": 4},
    "tp": {"dp_replicate_size": 2, "tp_size": 2},
    "fsdp and tp": {"dp_shard_size": 2, "tp_size": 2},
}


def make_config() -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    return config


def held(tensors: Any) -> int:
    """Return the bytes of the storages of tensors on this rank, each once."""
    parts = [local_part(tensor) for tensor in tensors]
    storages = [part.untyped_storage() for part in parts]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def parameters_alive() -> int:
    """Return the bytes of all weights of this process: parts, gathered ones, and those that are on their way."""
    objects = gc.get_objects()
    arriving = [each.all_gather_output for each in objects if type(each).__name__ == "AllGatherResult"]
    return held([*(each for each in objects if isinstance(each, nn.Parameter)), *arriving])


def measured(sizes: dict[str, Any]) -> dict[str, int]:
    """Return what one real rank holds in a step."""
    plugin = FullyShardedDataParallelPlugin() if sizes.get("dp_shard_size") else None
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)
    gc.collect()
    before = parameters_alive()
    model = LlamaForCausalLM(make_config())
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    model, optimizer = accelerator.prepare(model, optimizer)
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}  # the storages too: the address of a freed one comes back
    peak = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        kept[storage._cdata] = storage, storage.nbytes()
        return tensor

    weights: dict[int, torch.UntypedStorage] = {}

    def watch(*_: Any) -> None:
        peak[0] = max(peak[0], parameters_alive())
        alive = [each for each in gc.get_objects() if isinstance(each, nn.Parameter)]
        weights.update((storage._cdata, storage) for storage in (local_part(each).untyped_storage() for each in alive))

    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_hook(watch)
            module.register_full_backward_pre_hook(watch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    activations = sum(size for key, (_, size) in kept.items() if key not in weights)
    accelerator.backward(loss)
    gradients = held([p.grad for p in model.parameters()])
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {"weights": peak[0] - before, "gradients": gradients, "optimizer": held(states), "activations": activations}


@pytest.mark.slow
def test_simulated_ranks_hold_what_real_ranks_hold() -> None:
    real = run_world(lambda: {name: measured(sizes) for name, sizes in SIZES.items()}, num_processes=4)[0]
    for name, sizes in SIZES.items():
        with torch.device("meta"):
            model = LlamaForCausalLM(make_config())
        memory = simulate(model, example_forward(model, 2, 32)[0], ParallelismConfig(**sizes)).memory
        for part, size in real[name].items():
            assert getattr(memory, part) == pytest.approx(size, rel=0.1), (name, part)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder with the configuration of a small model."""
    make_config().save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_thousand_ranks_are_planned_in_one_process(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(["plan", folder, "--world", "1024", "--tp", "4", "--dp-shard", "64", "--memory", "80GB"]) == 0
    assert time.monotonic() - began < 60
    text = capsys.readouterr().out
    assert text.startswith("dp_replicate 4 × dp_shard 64 × tp 4; ranks 0 (0, 0, 0), 1 (0, 0, 1)")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row[0] for row in rows if len(row) == 3 and row[1].isdigit()] == ["tp", "dp_shard", "dp_replicate"]
    assert "Suggested for 74.51 GB: dp_replicate_size=1024 (" in text, "a small model needs nothing but copies"


def test_a_mesh_that_fits_into_less_memory_is_split_more(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def suggested(memory: str) -> str:
        assert main(["plan", folder, "--world", "8", "--sequence-length", "32", "--memory", memory]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert "dp_replicate_size=8 (" in suggested("100MB")
    assert "dp_shard_size=" in suggested("4MB")
    assert suggested("1KB").startswith("No mesh of dp_replicate, dp_shard and tp fits into 1000 bytes.")


def test_messages_are_those_of_the_weights_and_of_each_layer() -> None:
    def messages(**sizes: Any) -> dict[str, tuple[int, int]]:
        with torch.device("meta"):
            model = LlamaForCausalLM(make_config())
        rank = simulate(model, example_forward(model, 2, 32)[0], ParallelismConfig(**sizes))
        assert rank.has_counted_messages
        return {name: (each.count, each.size) for name, each in rank.messages.items()}

    with torch.device("meta"):
        block, total = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, held_values(LlamaForCausalLM(make_config()))
    assert messages(dp_replicate_size=2) == {"dp_replicate": (1, 4 * total)}
    # FSDP2 gathers blocks twice and the rest once, and reduces each gradient once.
    assert messages(dp_shard_size=2) == {"dp_shard": (7 + 6 + 7, 4 * (2 * total + 6 * block))}
    activation = 2 * 32 * 64 * 4
    count, size = messages(tp_size=2)["tp"]
    assert count >= 4 * 6, "two in the forward of a layer, two in its backward"
    assert size >= count * activation // 2


def held_values(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_plans_that_cannot_be_made_say_why(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*options: str) -> str:
        assert main(["plan", *options]) == 2
        return capsys.readouterr().err

    assert "takes 6 processes, and there are 8" in error(folder, "--world", "8", "--tp", "3", "--dp-shard", "1")
    assert "tp_size=8 does not divide the 4 num_attention_heads" in error(folder, "--world", "8", "--tp", "8")
    assert "simulates dp_replicate, dp_shard and tp only" in error(folder, "--world", "8", "--pp", "2")
    assert "cannot be read" in error(f"{folder}/nothing", "--world", "8")
    with pytest.raises(UnsupportedError, match="cp_size=2"):
        simulate(nn.Linear(1, 1), lambda model: model, ParallelismConfig(cp_size=2))


def test_no_mesh_is_suggested_without_activations(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_lib.commands.plan.simulated_rank.activation_bytes", lambda *_: None)
    assert main(["plan", folder, "--world", "2", "--memory", "1GB"]) == 2
    assert "No mesh can be suggested: a forward of this model cannot be computed" in capsys.readouterr().err
