"""`trainer-lib plan`: what a user types and reads."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_lib import ParallelismConfig, TrainingArguments
from trainer_lib.commands.main import main
from trainer_lib.commands.plan.optimizer_states import optimizer_bytes
from trainer_lib.commands.plan.pipeline_schedule import activations_in_flight
from trainer_lib.commands.plan.rank_memory import RankMemory
from trainer_lib.commands.plan.simulated_rank import SimulatedRank, Simulation
from trainer_lib.commands.plan.training_job import TrainingJob, job_of_model, loss_or_outputs
from trainer_lib.options.parallel.pipeline_options import LOOPED
from trainer_lib.state.parallelism_resolution import arrange
from trainer_lib.utils import TorchPipelineParallelConfig

SCRIPT = """
import sys
import torch
from torch import nn
from trainer_lib import ParallelismConfig, Trainer, TrainingArguments

width = int(sys.argv[1]) if len(sys.argv) > 1 else 32
model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
args = TrainingArguments(
    parallelism=ParallelismConfig(dp_shard_size=4), per_device_train_batch_size=8, global_batch_size=64,
    optimizer="sgd", optimizer_kwargs={"momentum": 0.9}, mixed_precision="bf16", num_workers=2,
)
data = torch.randn(640, 16), torch.randint(4, (640,))
print("weights on", model[0].weight.device)
Trainer(model, args, train_dataset=data, loss_fn=nn.functional.cross_entropy).fit()
raise RuntimeError("fit has returned")
"""

Plan = Callable[..., str]


def make_config(layers: int = 2) -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    return config


def ranks_of(sizes: dict[str, Any], **options: Any) -> list[SimulatedRank]:
    """Return the simulated ranks of a small llama."""
    with torch.device("meta"):
        model = LlamaForCausalLM(make_config())
    plugin, config, _ = arrange(None, ParallelismConfig(**sizes), ParallelismConfig(**sizes).total_size)
    simulation = Simulation(job_of_model(model, 2, 32, TrainingArguments(use_cpu=True, **options)))
    return simulation.ranks(config or ParallelismConfig(), plugin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the configuration of a small model."""
    path = tmp_path_factory.mktemp("llama")
    make_config().save_pretrained(path)
    return str(path)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that runs the command, and returns what it prints."""

    def run(*options: str, code: int = 0) -> str:
        assert main(["plan", *options]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


def rows(text: str, columns: int) -> list[list[str]]:
    """Return the rows of a table."""
    found = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return [row for row in found if len(row) == columns]


@pytest.mark.slow
def test_a_thousand_ranks_are_planned_in_one_process(folder: str, plan: Plan) -> None:
    began = time.process_time()
    text = plan(folder, "--world", "1024", "--tp", "4", "--dp-shard", "64", "--memory", "80GB")
    assert time.process_time() - began < 60
    assert text.startswith("dp_replicate 4 × dp_shard 64 × tp 4; ranks 0 (0, 0, 0), 1 (0, 0, 1)")
    assert [row[0] for row in rows(text, 3)] == ["dimension", "tp", "dp_shard", "dp_replicate"]
    assert "Suggested for 74.51 GB: dp_replicate_size=1024 (" in text, "a small model needs nothing but copies"
    assert "This mesh fits with" not in text, "it fits already"


@pytest.mark.slow
def test_a_mesh_and_a_lever_are_suggested_that_fit(folder: str, plan: Plan) -> None:
    def suggested(memory: str, *options: str) -> list[str]:
        return plan(folder, "--world", "8", "--memory", memory, *options).splitlines()[-2:]

    lever, mesh = suggested("2.9MB")
    assert lever.startswith("This mesh fits with --gradient_checkpointing (")
    assert "Not enough: --chunked_cross_entropy" in lever
    assert "dp_shard_size=2 (" in mesh
    assert "Tried before, fewest messages first, and what each takes at least: dp_replicate " in mesh
    lever, mesh = suggested("1KB")
    assert lever.startswith("No lever makes this mesh fit into 1000 bytes. Tried: --chunked_cross_entropy")
    assert "--optimizer adamw_torch_8bit" in lever  # not bitsandbytes' states of 8 bits, which need whole weights
    lever, _ = plan(folder, "--world", "1", "--memory", "1KB").splitlines()[-2:]
    assert "--optimizer_in_backward (without gradient clipping: max_grad_norm=None) " in lever
    assert mesh.startswith("No mesh of copies, shards, tp, pp and cp fits into 1000 bytes.")
    assert all(kind in mesh for kind in ("dp_shard × tp ", "pp × dp_shard ", "dp_shard × cp "))


@pytest.mark.slow
def test_messages_are_those_of_the_weights_and_of_each_layer() -> None:
    def messages(**sizes: Any) -> dict[str, tuple[int, int]]:
        (rank,) = ranks_of(sizes)
        assert rank.has_counted_messages
        return {name: (each.count, each.size) for name, each in rank.messages.items()}

    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in LlamaForCausalLM(make_config()).parameters())
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert messages(dp_replicate_size=2) == {"dp_replicate": (1, 4 * total)}
    # FSDP2 gathers blocks twice and the rest once, and reduces each gradient once.
    assert messages(dp_shard_size=2) == {"dp_shard": (3 + 2 + 3, 4 * (2 * total + 2 * block))}
    activation = 2 * 32 * 64 * 4
    count, size = messages(tp_size=2)["tp"]
    assert count >= 4 * 2, "two in the forward of a layer, two in its backward"
    assert size >= count * activation // 2
    part = activation // 2
    # Keys with values are gathered in the forward and again in the backward, and their gradients are reduced.
    assert messages(cp_size=2, dp_shard_size=2)["cp"] == (2 * 3, 2 * 6 * 2 * part)
    # Queries, keys, values and outputs are exchanged in the forward, and their gradients in the backward.
    assert messages(sp_size=2, dp_shard_size=2)["sp"][1] == 2 * 8 * part


def test_the_stages_of_a_pipeline_send_each_micro_batch() -> None:
    first, last = ranks_of({"pp_size": 2}, gradient_accumulation_steps=4)
    activation = 2 * 32 * 64 * 4
    for rank in (first, last):
        assert (rank.messages["pp"].count, rank.messages["pp"].size) == (4, 4 * activation)
    for rank in ranks_of({"pp_size": 2, "cp_size": 2}, gradient_accumulation_steps=4):
        assert (rank.messages["pp"].count, rank.messages["pp"].size) == (4, 4 * activation // 2), "half of a sequence"
        assert rank.messages["cp"].count > 0
    assert first.stages == [0]
    assert (first.memory.activations or 0) > 1.3 * (last.memory.activations or 0), "two micro-batches are in flight"


@pytest.mark.slow
def test_levers_keep_less() -> None:
    def memory(**options: Any) -> RankMemory:
        return ranks_of({}, **options)[0].memory

    plain, offloaded = memory(), memory(activation_offload=True)
    recomputed = memory(gradient_checkpointing=True)
    both = memory(gradient_checkpointing=True, activation_offload=True)
    kept = [each.activations or 0 for each in (plain, recomputed, both)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3
    assert (offloaded.activations or 0) < 0.5 * (plain.activations or 0), "what is left is in no block"
    assert offloaded.buffers > plain.buffers, "two blocks are on their way"
    assert memory(chunked_cross_entropy=True).activations != plain.activations


def test_schedules_keep_what_they_have_in_flight() -> None:
    def kept(schedule: str | None, rank: int, count: int) -> int:
        options = TorchPipelineParallelConfig(schedule=schedule)
        stages = {rank + turn * 4: 1 for turn in range(options.stages_per_rank or 1)}
        return activations_in_flight(options, rank, 4, count, stages)

    assert [kept("GPipe", rank, 8) for rank in range(4)] == [8, 8, 8, 8]
    assert [kept("1F1B", rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert kept("1F1B", 3, 2) == 2, "with fewer than pp_size it runs as GPipe"
    assert kept(None, 0, 8) == 1
    assert kept("LoopedBFS", 0, 3) == 2, "too few for the schedule: through all stages one by one"
    assert [kept(name, 0, 8) > kept(name, 3, 8) for name in LOOPED] == [False, True, False]


def test_optimizers_hold_what_they_hold_after_a_step() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8))
    model[1].requires_grad_(False)

    def held(name: str, **options: Any) -> int:
        args = TrainingArguments(use_cpu=True, optimizer=name, optimizer_kwargs=options)
        job = TrainingJob(model, torch.zeros(1, 128), args, loss_or_outputs)
        return optimizer_bytes(job, model, lambda parameter: tuple(parameter.shape))

    matrix, bias = 128 * 128, 128
    assert held("adamw") == 8 * (matrix + bias)
    assert held("sgd") == 0
    assert held("sgd", momentum=0.9) == 4 * (matrix + bias)
    assert held("adafactor") == 4 * (128 + 128) + 4 * bias, "a row and a column for each matrix"
    assert held("muon") == 4 * matrix + 8 * bias
    assert held("lion_8bit") == matrix + 4 * matrix // 256 + 4 * bias
    assert held("adamw_8bit") == 2 * (matrix + 4 * matrix // 256 + 4 * bias)


def test_a_script_is_planned_up_to_its_fit(tmp_path: Path, plan: Plan) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    text = plan(str(script))
    assert text.startswith("dp_shard 4; ranks 0 (0)"), "what the script prints is not part of it"
    assert "Memory of a rank: sgd, precision bf16, micro-batches of 8 × 16" in text
    assert "Messages of a step of 2 micro-batches" in text, "64 samples of 4 ranks, each with 8"
    wide = plan(str(script), "--", "64")
    assert rows(wide, 6)[1] != rows(text, 6)[1], "the script has its own options"
    text = plan(str(script), "--world", "8", "--dp_shard", "1", "--optimizer", "adamw", "--precision", "no")
    assert text.startswith("dp_replicate 8; ranks")
    _, (_, gradients, optimizer, *_) = rows(text, 6)
    assert float(optimizer.split()[0]) == pytest.approx(2 * float(gradients.split()[0]), rel=0.01)
    assert "Sequential has no plan of tensor parallelism" in plan(str(script), "--world", "8", "--tp", "2", code=2)


def test_scripts_that_cannot_be_planned_say_why(tmp_path: Path, plan: Plan) -> None:
    def error(text: str, *options: str) -> str:
        script = tmp_path / "train.py"
        script.write_text(text)
        return plan(str(script), *options, code=2)

    assert "ended without Trainer.fit()" in error("print(1)")
    failed = error("import torch\nfloat(torch.nn.Linear(1, 1).weight)")
    assert "failed before Trainer.fit()" in failed
    assert "--with_weights" in failed
    assert "ended without Trainer.fit()" in error("import torch\nfloat(torch.nn.Linear(1, 1).weight)", "--with_weights")
    assert "There is no script" in plan(str(tmp_path / "other.py"), code=2)


def test_plans_that_cannot_be_made_say_why(folder: str, plan: Plan) -> None:
    def error(*options: str) -> str:
        return plan(folder, *options, code=2)

    assert "takes 6 processes, and there are 8" in error("--world", "8", "--tp", "3", "--dp-shard", "2")
    assert "tp_size=8 does not divide the 4 num_attention_heads" in error("--world", "8", "--tp", "8")
    assert "sp_size=8 cannot share out the 4 attention heads" in error("--world", "8", "--sp", "8")
    assert "The nearest size that does is 4." in error("--world", "8", "--sp", "8")
    assert "8 stages need as many blocks" in error("--world", "8", "--pp", "8")
    assert "dp_shard_size is 1. Give --dp_shard too" in error("--world", "2", "--cpu_offload")
    assert "are options of a script" in error("--world", "2", "--", "--lr", "1")
    assert "cannot be read" in plan(f"{folder}/nothing", "--world", "8", code=2)


def test_no_mesh_is_suggested_without_activations(tmp_path: Path, plan: Plan) -> None:
    script = tmp_path / "train.py"
    reads = "class Reads(nn.Module):\n    def forward(self, x):\n        return x * float(x.sum())\n\n"
    text = SCRIPT.replace("width = int", f"{reads}width = int").replace("nn.ReLU()", "Reads()")
    script.write_text(text)
    assert rows(plan(str(script)), 6)[1][3] == "unknown"
    assert "No mesh can be suggested: a forward of this model cannot be computed" in plan(
        str(script), "--memory", "1GB", code=2
    )
