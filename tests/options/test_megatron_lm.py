"""Options of Megatron-LM: what becomes of each field."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.options import megatron_lm_table
from tests.strategies.split import gpt2, llama
from trainer_lib import Accelerator, ParallelismConfig
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.megatron_lm.fields import MAPPED, MEMORY, REFUSED
from trainer_lib.strategies.tensor_parallel.tensor_parallel_plan import resolve
from trainer_lib.utils import (
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    TorchTensorParallelConfig,
    avg_losses_across_data_parallel_group,
    patch_environment,
)

FIELDS = {field.name: field for field in dataclasses.fields(MegatronLMPlugin)}


def test_each_field_has_one_explanation_and_the_page_has_them() -> None:
    names = [*MAPPED, *MEMORY, *REFUSED]
    assert sorted(names) == sorted(FIELDS)
    text = megatron_lm_table.PAGE.read_text()
    assert text == megatron_lm_table.with_table(text), "Write it by: python -m tests.options.megatron_lm_table"


def test_a_field_without_a_counterpart_is_refused_with_the_reason() -> None:
    for name, why in REFUSED.items():
        default = FIELDS[name].default
        value: Any = "other" if isinstance(default, str) else 7
        with pytest.raises(UnsupportedError) as error:
            MegatronLMPlugin(**{name: value})
        assert str(error.value) == f"MegatronLMPlugin({name}={value!r}) has no counterpart: {why}."
    with pytest.raises(UnsupportedError, match=r"lr_mult=1.5\)"):
        MegatronLMPlugin(lr_mult=1.5)
    asks_for_nothing: dict[str, Any] = {"no_load_optim": False, "expert_model_parallel_size": 1, "lr_mult": 1.0}
    MegatronLMPlugin(**asks_for_nothing)


def test_whole_experts_are_spread_over_the_ranks_that_split_matrices() -> None:
    assert not MegatronLMPlugin(tp_degree=2, expert_tensor_parallel_size=1).spreads_experts
    plugin = MegatronLMPlugin(tp_degree=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert plugin.spreads_experts
    assert plugin.mesh_sizes(4)["tp_size"] == 2
    refused: list[dict[str, Any]] = [
        {"expert_model_parallel_size": 2},  # over ranks that read other batches
        {"tp_degree": 2, "expert_model_parallel_size": 2},  # each expert split too, over ranks with other batches
        {"tp_degree": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"tp_degree": 2, "expert_tensor_parallel_size": 2},
    ]
    for options in refused:
        with pytest.raises(UnsupportedError, match=r"has no counterpart: whole experts .* Give all three"):
            MegatronLMPlugin(**options)


def test_what_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"overlap_cpu_optimizer_d2h_h2d": True, "sequence_parallelism": True}
    plugin = MegatronLMPlugin(seq_length=64, **options)
    assert Accelerator(cpu=True, megatron_lm_plugin=plugin).state.megatron_lm_plugin is plugin
    assert [record.message for record in caplog.records] == [
        "MegatronLMPlugin: overlap_cpu_optimizer_d2h_h2d has no effect (FSDP2 decides when it copies).",
        "MegatronLMPlugin: sequence_parallelism has no effect (norms stay whole without tp_degree above 1, and in "
        "pipelines).",
    ]


def test_a_model_without_a_plan_of_sequences_has_its_usual_one(caplog: pytest.LogCaptureFixture) -> None:
    splitting, usual = TorchTensorParallelConfig(sequence_parallel=True), TorchTensorParallelConfig()
    Accelerator(cpu=True)
    assert resolve(gpt2(), splitting, 2) == resolve(gpt2(), usual, 2)
    assert "sequence_parallel=True has no effect on GPT2LMHeadModel: norms stay whole" in caplog.text
    assert resolve(llama(), splitting, 2)["model.norm"] == "sequence_parallel_gather"
    caplog.clear()
    bare: Any = llama().model  # its first block is named layers.0, so nothing would scatter the sequence
    assert "sequence" not in str(resolve(bare, splitting, 2))
    assert "sequence_parallel=True has no effect on LlamaModel" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_tensor_parallel_size": 0}, "expert_tensor_parallel_size must be a whole number of at least 1, got 0"),
        ({"tp_degree": 0}, "tp_degree must be a whole number of at least 1, got 0"),
        ({"use_custom_fsdp": "yes"}, "use_custom_fsdp must be True or False"),
        ({"gradient_clipping": -1}, r"gradient_clipping must be a norm, or 0 for none \(got -1\)"),
        ({"gradient_clipping": math.nan}, r"gradient_clipping must be a norm, or 0 for none \(got nan\)"),
        ({"seq_length": -1}, "seq_length must be a whole number of at least 1, got -1"),
        ({"decoder_seq_length": 1.5}, "decoder_seq_length must be a whole number of at least 1, got 1.5"),
        ({"eval_interval": 0}, "eval_interval must be a whole number of at least 1, got 0"),
        ({"eval_iters": -1}, "eval_iters must be a whole number of at least 0, got -1"),
        ({"eod_mask_loss": "yes"}, "eod_mask_loss must be True or False, got 'yes'"),
        ({"is_train_batch_min": None}, "is_train_batch_min must be True or False, got None"),
        ({"min_lr": -1e-5}, r"min_lr must be a finite number of at least 0, got -1e-05"),
        ({"lr_warmup_fraction": "0.1"}, r"lr_warmup_fraction must be at least 0 and below 1 \(got '0\.1'\)"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": "0", "end_weight_decay": 0.1},
            r"start_weight_decay must be a finite number of at least 0, got '0'",
        ),
        ({"recompute_granularity": "half"}, "Unknown recompute_granularity 'half'. Known: full, selective"),
        (
            {"lr_decay_style": "square"},
            "Unknown lr_decay_style 'square'. Known: constant, cosine, inverse-square-root, linear",
        ),
        ({"train_iters": 1, "train_samples": 2}, "train_iters and train_samples say the same: give one of them"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "lr_warmup_iters and lr_warmup_fraction say the same"),
        ({"lr_warmup_fraction": 1.0}, r"lr_warmup_fraction must be at least 0 and below 1 \(got 1\.0\)"),
        ({"start_weight_decay": 0.1}, "start_weight_decay and end_weight_decay belong to weight_decay_incr_style="),
        ({"weight_decay_incr_style": "linear"}, "belong to weight_decay_incr_style='linear' or 'cosine'"),
        ({"recompute_num_layers": 1}, "belong to recompute_granularity='full'"),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1, "pp_degree": 2},
            "recompute_method='block' counts the layers of each stage",
        ),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True needs use_distributed_optimizer=True or"),
    ],
)
def test_wrong_values_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(**options)


def test_the_ranks_that_the_degrees_leave_replicate_or_shard() -> None:
    sizes = {"tp_size": 2, "pp_size": 1, "cp_size": 1}
    assert MegatronLMPlugin(tp_degree=2).mesh_sizes(6) == {"dp_replicate_size": 3, "dp_shard_size": 1, **sizes}
    sharding = MegatronLMPlugin(tp_degree=2, use_distributed_optimizer=True)
    assert sharding.mesh_sizes(6) == {"dp_replicate_size": 1, "dp_shard_size": 3, **sizes}
    assert sharding.sharding(2) is None
    states: Any = sharding.sharding(4)
    whole: Any = MegatronLMPlugin(use_custom_fsdp=True, optimizer_cpu_offload=True).sharding(2)
    assert (states.reshard_after_forward, bool(states.cpu_offload)) == (False, False)
    assert (whole.reshard_after_forward, bool(whole.cpu_offload)) == (True, True)
    assert MegatronLMPlugin(tp_degree=2, pp_degree=2, sequence_parallelism=True).matrix_splitting is None
    assert MegatronLMPlugin(tp_degree=2).matrix_splitting is None
    splitting = MegatronLMPlugin(tp_degree=2, sequence_parallelism=True).matrix_splitting
    assert splitting is not None
    assert splitting.sequence_parallel
    with pytest.raises(ConfigurationError, match=r"must divide the number of processes \(3\)\. Start 4 processes"):
        MegatronLMPlugin(tp_degree=2).mesh_sizes(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"megatron_lm_plugin": "x"}, "megatron_lm_plugin must be a MegatronLMPlugin"),
        ({"parallelism_config": ParallelismConfig()}, "megatron_lm_plugin and parallelism_config both say how models"),
        (
            {"gradient_accumulation_steps": 3},
            r"gradient_accumulation_steps=3, and MegatronLMPlugin\(num_micro_batches=2",
        ),
    ],
)
def test_what_contradicts_the_plugin_is_told(options: dict[str, Any], message: str) -> None:
    arguments: Any = {"megatron_lm_plugin": MegatronLMPlugin(num_micro_batches=2), **options}
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **arguments)


def test_the_launcher_fills_what_a_script_leaves_out() -> None:
    asked = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_NUM_MICRO_BATCHES": "4"}
    asked |= {"MEGATRON_LM_GRADIENT_CLIPPING": "0.5", "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": "true"}
    with patch_environment(**asked):
        accelerator = Accelerator(cpu=True)
        plugin = accelerator.state.megatron_lm_plugin
        assert plugin == MegatronLMPlugin(num_micro_batches=4, gradient_clipping=0.5, recompute_activations=True)
        assert MegatronLMPlugin(num_micro_batches=2).num_micro_batches == 2
        assert accelerator.gradient_accumulation_steps == 4
        assert accelerator.distributed_type == "MEGATRON_LM"
    with (
        patch_environment(MEGATRON_LM_TP_DEGREE="two"),
        pytest.raises(ConfigurationError, match="MEGATRON_LM_TP_DEGREE=two cannot be read"),
    ):
        MegatronLMPlugin()


def test_a_loop_that_does_not_count_micro_batches_is_told() -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2))
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigurationError, match=r"Put `with accelerator\.accumulate\(model\):` around"):
        optimizer.step()


def test_the_schedule_rises_and_falls_as_the_plugin_says() -> None:
    rates: dict[str, list[float]] = {}
    for style in ("linear", "cosine", "constant", "inverse-square-root"):
        model = nn.Linear(2, 1)
        plugin = MegatronLMPlugin(lr_decay_style=style, min_lr=0.2, gradient_clipping=0)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, dummy)
        rates[style] = []
        for _ in range(8):
            rates[style].append(scheduler.get_last_lr()[0])
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        del accelerator, model, optimizer, scheduler, dummy
    assert rates["linear"] == pytest.approx([0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates["cosine"] == pytest.approx([0, 0.5, 1, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2, 0.2])
    assert rates["constant"] == [0, 0.5, 1, 1, 1, 1, 1, 1]
    assert rates["inverse-square-root"] == pytest.approx([0, 0.5, *((2 / step) ** 0.5 for step in range(2, 7)), 0.2])


def test_a_schedule_needs_a_plugin_and_an_end() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    with pytest.raises(ConfigurationError, match="MegatronLMDummyScheduler stands for the schedule of a MegatronLMPl"):
        Accelerator(cpu=True).prepare(MegatronLMDummyScheduler(optimizer))
    with pytest.raises(ConfigurationError, match="needs total_num_steps"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()).prepare(MegatronLMDummyScheduler(optimizer))
    with pytest.raises(ConfigurationError, match="does not know total_steps"):
        MegatronLMDummyScheduler(optimizer, total_steps=3)


@pytest.mark.parametrize(("method", "count", "expected"), [("block", 1, [True, False]), ("uniform", 2, [True, True])])
def test_the_first_blocks_recompute_their_activations(method: str, count: int, expected: list[bool]) -> None:
    options: dict[str, Any] = {"recompute_method": method, "recompute_num_layers": count}
    plugin = MegatronLMPlugin(recompute_granularity="full", **options)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model: Any = llama()
    accelerator.prepare(model)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == expected


def test_updates_of_a_schedule_need_loaders_or_an_end() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    dummy = MegatronLMDummyScheduler(optimizer)
    plugin = MegatronLMPlugin(lr_decay_samples=8)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    with pytest.raises(ConfigurationError, match="lr_decay_samples=8 is divided by the samples of an update, which"):
        accelerator.prepare(dummy)
    plugin.lr_decay_samples, plugin.lr_decay_iters, plugin.lr_warmup_iters = None, 4, 4
    with pytest.raises(ConfigurationError, match=r"The warm-up \(4 updates\) must end before the decay \(4 updates\)"):
        accelerator.prepare(dummy)
    plugin.lr_warmup_iters, plugin.weight_decay_incr_style = 0, "cosine"
    with pytest.raises(ConfigurationError, match=r"weight_decay_incr_style='cosine' needs train_iters=…"):
        accelerator.prepare(dummy)


def test_the_samples_of_an_update_are_counted() -> None:
    for smallest, expected in ((True, 12), (False, 32)):
        plugin = MegatronLMPlugin(num_micro_batches=4, is_train_batch_min=smallest)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        accelerator.prepare(*(DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=size) for size in (3, 8)))
        assert plugin.global_batch_size == expected
        del accelerator


def test_losses_are_averaged() -> None:
    averaged = avg_losses_across_data_parallel_group([torch.tensor(2.0), torch.tensor([3.0])])
    assert averaged.tolist() == [2.0, 3.0]
