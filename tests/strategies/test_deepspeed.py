"""ZeRO 0 to 3 with DeepSpeed on two CPU processes: the numbers are those of one process."""

import functools
import importlib
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.options.test_deepspeed import HANDBOOK
from tests.strategies import sharded
from tests.strategies.sharded import Case, Stack, Tied, train
from trainer_lib import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from trainer_lib.accelerator.deepspeed_config import apply_config
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.foundation.imports import is_deepspeed_available
from trainer_lib.launchers import run_forked
from trainer_lib.state import AcceleratorState, PartialState
from trainer_lib.strategies.deepspeed.engine_config import engine_config
from trainer_lib.utils import GatheredParameters
from trainer_lib.utils.deepspeed import (
    DummyOptim,
    DummyScheduler,
    get_active_deepspeed_plugin,
    get_fp32_state_dict_from_zero_checkpoint,
)

needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available(), reason="DeepSpeed is not installed: make test-deepspeed"
)


def plugin() -> DeepSpeedPlugin:
    return DeepSpeedPlugin(zero_stage=0)


class Flat(Stack):
    """A stack without a weight that has no dimensions, which DeepSpeed does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0]))


class Experts(nn.Module):
    """Two experts, of which each rank uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[PartialState().process_index](inputs)


class FlatTied(Tied):
    """The same with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0]))


KINDS = {
    "plain": Case(),
    "accumulation": Case(steps=2),  # does not divide the 3 batches of a pass: the last window is short
    "weighted": Case(weighted=True, clip=None),
    "weighted accumulation": Case(weighted=True, steps=2),
    "tied": Case(kind=FlatTied, steps=2),
    "largest gradient": Case(norm_type=float("inf")),
    "cut values": Case(clip=None, clip_value=0.05),
    "evaluation before step": Case(interlude="evaluating"),
    "reduced each time": Case(weighted=True, steps=2, sync_each_batch=True),
    "optimizer afterwards": Case(order="afterwards"),
    "optimizer before": Case(order="optimizer before", steps=2),
}
OFFLOADED = {"offload_optimizer_device": "cpu"}
PLUGINS = {
    "ZeRO-0": {"zero_stage": 0},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "ZeRO-1, offload": {"zero_stage": 1, **OFFLOADED},
    "ZeRO-2, offload": {"zero_stage": 2, **OFFLOADED},
    "ZeRO-3, offload": {"zero_stage": 3, **OFFLOADED, "offload_param_device": "cpu"},
}


@pytest.fixture(scope="module")
def package() -> Any:
    """Import DeepSpeed once, for all forked processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # imports inductor
        return importlib.import_module("deepspeed")


def test_several_plugins_and_the_active_one() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=0), "teacher": DeepSpeedPlugin(zero_stage=0)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert accelerator.deepspeed_plugin is plugins["student"]
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is plugins["teacher"]
    assert accelerator.state.get_deepspeed_plugin("student") is plugins["student"]
    with pytest.raises(ConfigurationError, match=r"Unknown DeepSpeed plugin 'students'.*'student'"):
        accelerator.state.select_deepspeed_plugin("students")
    assert accelerator.distributed_type == "DEEPSPEED"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deepspeed_plugin": plugin(), "deepspeed_plugins": plugin()}, "both deepspeed_plugin and deepspeed_plugins"),
        ({"deepspeed_plugin": {}}, "must be a DeepSpeedPlugin or a dict of them by name .got dict"),
        ({"deepspeed_plugin": {"a": 1}}, r"deepspeed_plugins\['a'\] must be a DeepSpeedPlugin .got int"),
        (
            {"deepspeed_plugin": plugin(), "fsdp_plugin": FullyShardedDataParallelPlugin()},
            "deepspeed_plugin and fsdp_plugin both say how models are sharded",
        ),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_quantized_gradients.*not supp",
        ),
        (
            {"curriculum_learning": {"enabled": True}},
            "curriculum_learning, which this version does not support: .*sampler",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, '"auto" where no value is known'),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
                }
            },
            r"NVMe \(offload_param\), which this version does not support: .* swaps them in bf16.*'cpu'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
            r"NVMe \(offload_optimizer\), which this version does not support: .* wrong gradients.*'cpu'",
        ),
    ],
)
def test_what_the_window_cannot_carry_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        engine_config(DeepSpeedPlugin(config), nn.Linear(2, 2))


def test_the_engine_gets_what_is_sharded_and_nothing_that_is_ours() -> None:
    model = nn.Linear(2, 2)
    model.__dict__["config"] = SimpleNamespace(hidden_size=8)
    zero = {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 100}
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "activation_checkpointing": {"partition_activations": True},
    }
    config = engine_config(DeepSpeedPlugin(given), model)
    assert config["zero_optimization"] == {**zero, "reduce_bucket_size": 64}
    assert config["activation_checkpointing"] == {"partition_activations": True}
    assert (config["gradient_clipping"], config["managed_gradient_accumulation"]) == (0.0, False)
    assert not {"train_batch_size", "optimizer", "bf16"} & set(config)


def test_stage_1_has_nothing_to_overlap() -> None:
    for stage, overlap in ((1, None), (2, True)):
        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": stage, "overlap_comm": True}})
        config = engine_config(plugin, nn.Linear(2, 2))
        assert config["zero_optimization"].get("overlap_comm") is overlap
        assert plugin.get_value("zero_optimization.overlap_comm") is True


OF_CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"},
    },
    "zero_optimization": {"stage": 0},
}


def test_dummies_become_the_optimizer_and_the_schedule_of_the_config() -> None:
    plugin = DeepSpeedPlugin({key: value for key, value in OF_CONFIG.items() if key != "scheduler"})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    dummy = DummyOptim(model.parameters(), lr=0.5, weight_decay=0.25)
    schedule = DummyScheduler(dummy, lr_scheduler_callable=lambda made: LambdaLR(made, lambda step: 1 / (1 + step)))
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, dummy, loader, schedule)
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, 0.25)
    assert plugin.filled["train_batch_size"] == 8
    assert plugin.filled["gradient_accumulation_steps"] == 2
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.25]
    assert get_active_deepspeed_plugin(accelerator.state) is plugin


def test_a_loader_prepared_later_may_have_another_batch_size_than_the_one_that_filled_auto() -> None:
    plugin = DeepSpeedPlugin({"train_batch_size": "auto", "zero_optimization": {"stage": 0}})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    training, evaluation = (DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=size) for size in (2, 4))
    accelerator.prepare(training)
    assert len(accelerator.prepare(evaluation)) == 2
    assert plugin.filled["train_batch_size"] == 2


def test_a_loader_prepared_after_the_model_may_have_another_batch_size_than_the_config() -> None:
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(8, 2))
    accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(data, batch_size=2))
    assert len(accelerator.prepare(DataLoader(data, batch_size=4))) == 2
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 2


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_schedule_of_the_config_rises_to_the_rate_of_the_scripts_own_optimizer() -> None:
    section = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
    }
    plugin = DeepSpeedPlugin({"scheduler": section, "zero_optimization": {"stage": 0}})
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)
    _, schedule = apply_config(plugin, [optimizer, DummyScheduler(optimizer, warmup_num_steps=2)], 1, 1)
    for _ in range(3):
        schedule.step()
    assert plugin.filled["scheduler.params.warmup_max_lr"] == 0.5
    assert schedule.get_last_lr() == [0.5]


def test_the_config_accumulates_where_the_script_says_nothing() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0, gradient_accumulation_steps=3))
    assert accelerator.gradient_accumulation_steps == 3
    accelerator.free_memory()
    plugin = DeepSpeedPlugin(zero_stage=0, gradient_accumulation_steps=3)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps is 3 in the DeepSpeed config and 2"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)


def test_dummies_without_their_section_are_refused() -> None:
    model = nn.Linear(2, 1)
    dummy = DummyOptim(model.parameters())
    with pytest.raises(ConfigurationError, match="this Accelerator has none"):
        Accelerator(cpu=True).prepare(dummy)
    for config, values, message in (
        ({}, [dummy], "the section `optimizer` of the DeepSpeed config, which has none"),
        ({"optimizer": {"type": "Lamb"}}, [dummy], "optimizer.type='Lamb' .* no counterpart here"),
        (OF_CONFIG, [torch.optim.SGD(model.parameters())], "got an optimizer, and the DeepSpeed config has a section"),
        (OF_CONFIG, [dummy, DummyScheduler(dummy)], 'total_num_steps is "auto" .* no value is known'),
        ({"train_batch_size": 5}, [DataLoader(TensorDataset(torch.ones(2)), 2)], "train_batch_size is 5 .* and 2 in"),
    ):
        plugin = DeepSpeedPlugin({**config, "zero_optimization": {"stage": 0}})
        with pytest.raises((ConfigurationError, UnsupportedError), match=message):
            apply_config(plugin, values, 1, 1)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_script_whose_config_has_all() -> None:
    def body(stage: int) -> tuple[list[float], list[float]]:
        plugin = DeepSpeedPlugin({**OF_CONFIG, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        network = sharded.stack(Flat)
        dummy = DummyOptim(network.parameters(), lr=0.1)
        schedule = DummyScheduler(dummy, total_num_steps=6, warmup_num_steps=2)
        model, optimizer, schedule = accelerator.prepare(network, dummy, schedule)
        rates: list[float] = []
        losses: list[float] = []
        for _ in range(6):
            loss = model(torch.ones(2, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
            losses.append(loss.item())
        accelerator.free_memory()
        return rates, losses

    def all_stages() -> list[Any]:
        return [body(stage) for stage in (1, 2, 3)]

    first, *others = run_forked(all_stages, (), 2, timeout=100)[0]
    assert first[0] == pytest.approx([0.0, 0.1, 0.1, 0.075, 0.05, 0.025], abs=1e-6)
    assert first[1][-1] < first[1][0]
    for other in others:
        assert other[0] == first[0]
        assert other[1] == pytest.approx(first[1], rel=2e-6)


# Each kind and each plugin once; all of them with `--soak`.
SAMPLE = [(kind, list(PLUGINS)[number % len(PLUGINS)]) for number, kind in enumerate(KINDS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test of the matrix its cases."""
    if "pairs" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("--soak")
        pairs = [(kind, plugin) for kind in KINDS for plugin in PLUGINS] if is_whole else SAMPLE
        metafunc.parametrize(("kind", "plugin", "pairs"), [(*pair, tuple(pairs)) for pair in pairs],
                             ids=[", ".join(pair) for pair in pairs])  # fmt: skip


@functools.cache
def results(pairs: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what each kind tells in one process, and with its plugins in two."""
    (alone,) = run_forked(_all, ([(kind, "") for kind in dict(pairs)], False), 1, timeout=200)
    return alone, run_forked(_all, (pairs, True), 2, timeout=400)


def _all(pairs: Sequence[tuple[str, str]], shards: bool) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, plugin in pairs:
        case = KINDS[name]
        kind = Flat if case.kind is Stack else case.kind
        chosen = replace(case, kind=kind, deepspeed=True, plugin=PLUGINS.get(plugin, {}))
        told[f"{name} {plugin}"] = train(chosen, shards, epochs=2 if case.steps > 1 else 1)
    return told


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_zero_trains_as_one_process_does(kind: str, plugin: str, pairs: tuple[tuple[str, str], ...]) -> None:
    alone, together = results(pairs)
    expected, result = alone[f"{kind} "], together[0][f"{kind} {plugin}"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert result["norms"] == pytest.approx(expected["norms"], rel=2e-6)
    assert result["names"] == expected["names"]
    torch.testing.assert_close(result["shift"], expected["shift"], rtol=0, atol=0)
    assert list(result["weights"]) == list(expected["weights"])
    toy.assert_same(list(result["weights"].values()), list(expected["weights"].values()), rtol=1e-4)
    assert result["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for key, values in expected["optimizer"]["state"].items():
        state = result["optimizer"]["state"][key]
        toy.assert_same([state[part].float() for part in values], [v.float() for v in values.values()], rtol=1e-4)


def two_models(stage: int | None) -> tuple[list[float], list[Tensor]]:
    """Train two models with an optimizer each, in windows of two micro-batches; the second is clipped."""
    plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    networks = [sharded.stack(Flat), sharded.stack(FlatTied)]
    optimizers: Any = [torch.optim.AdamW(networks[0].parameters(), lr=0.05), None]
    optimizers[1] = torch.optim.SGD(networks[1].parameters(), lr=0.5, momentum=0.9)
    inputs, _, _ = toy.data()
    loader: Any = DataLoader(TensorDataset(inputs[:24]), batch_size=8 // accelerator.num_processes)
    first, second, *optimizers, loader = accelerator.prepare(*networks, *optimizers, loader)
    losses: list[float] = []
    for (batch,) in loader:  # three micro-batches: the last window has one
        with accelerator.accumulate(first, second):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                if model is second and accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(second.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.gather(loss.detach()[None]).mean()))
    weights = [value for model in (first, second) for value in accelerator.get_state_dict(model).values()]
    accelerator.free_memory()
    return losses, weights


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_two_models_train_side_by_side() -> None:
    def all_stages() -> list[Any]:
        return [two_models(stage) for stage in (1, 2, 3)]

    losses, weights = run_forked(two_models, (None,), 1, timeout=100)[0]
    assert len(losses) == 8
    for found, values in run_forked(all_stages, (), 2, timeout=200)[0]:
        assert found == pytest.approx(losses, rel=2e-6)
        toy.assert_same(values, weights, rtol=1e-4)


def step_without_backward(stage: int, offloads: bool) -> list[bool]:
    """Return whether weights changed: by an update, and by further steps without a backward."""
    plugin = DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device="cpu" if offloads else None)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Linear(10, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    changes: list[bool] = []

    def step() -> None:
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        optimizer.step()
        after = accelerator.get_state_dict(model)
        changes.append(any(not torch.equal(before[name], after[name]) for name in before))

    step()
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 10)).sum())
        model(torch.ones(1, 10))  # a forward without a backward, as an evaluation is one
        step()
        optimizer.zero_grad()
        step()
    accelerator.free_memory()
    return changes


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_without_a_backward_changes_nothing(stage: int, offloads: bool) -> None:
    on_main, *_ = run_forked(step_without_backward, (stage, offloads), num_processes=2)  # which alone has whole weights
    assert on_main == [False, True, False, True, False]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_weights_of_experts_are_gathered_together() -> None:
    def body(name: str) -> Any:
        plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names=name, zero3_init_flag=True)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model = nn.Sequential(nn.Linear(4, 4), Experts())
        try:
            prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        except ConfigurationError as error:
            return str(error)
        accelerator.backward(prepared(torch.ones(1, 4)).sum())  # each rank uses another expert
        return getattr(model[1], "_z3_leaf", False)

    assert run_forked(body, ("Experts",), 2, timeout=100) == [True, True]
    for message in run_forked(body, ("Expert",), 2, timeout=100):
        assert "Unknown class in transformer_moe_cls_names 'Expert'" in message
        assert "Did you mean 'Experts'?" in message


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_models_of_transformers_are_built_in_shards(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 32, (2, 12))

    def train_steps(accelerator: Accelerator, network: Any, rows: Tensor) -> list[float]:
        model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.01))
        losses: list[float] = []
        for _ in range(3):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def body() -> Any:
        sharded_always = {"stage": 3, "stage3_param_persistence_threshold": 0}
        plugin = DeepSpeedPlugin({"zero_optimization": sharded_always})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        with plugin.zero3_init_context_manager(enable=False):
            whole = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        network = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        sizes = [sum(p.numel() for p in built.parameters()) for built in (whole, network)]
        rank = accelerator.process_index
        losses = train_steps(accelerator, network, tokens[rank : rank + 1])
        norm = network.get_parameter("model.norm.weight")
        before = norm.shape
        with GatheredParameters(network.parameters(), modifier_rank=0):
            inside = norm.shape
            norm.data.fill_(rank + 3.0)
        weights = accelerator.get_state_dict(network)
        name = "model.norm.weight"
        return (
            sizes,
            losses,
            tuple(before),
            tuple(inside),
            weights[name].tolist() if rank == 0 else None,
            sorted(weights),
        )

    expected = train_steps(Accelerator(cpu=True), LlamaForCausalLM.from_pretrained(tmp_path / "model"), tokens)
    first, second = run_forked(body, num_processes=2, timeout=100)
    for sizes, losses, before, inside, *_ in (first, second):
        assert sizes[0] > 0
        assert sizes[1] == 0, "a rank builds its shards alone"
        assert losses == pytest.approx(expected, rel=2e-6)
        assert (before, inside) == ((0,), (16,))
    assert first[4] == [3.0] * 16, "what rank 0 wrote is what is saved"
    assert "lm_head.weight" in first[5]


class Overflowing(nn.Module):
    """Has gradients for one of two weights alone that overflow once they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.steep = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, slope: Tensor) -> Tensor:
        return self.plain.sum() + (self.steep * slope).sum()


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_all_ranks_skip_a_step_when_the_shard_of_one_overflows() -> None:
    def body(stage: int) -> Any:
        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": stage}, "fp16": {"enabled": True}})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        network = Overflowing()
        model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.5))
        skipped: list[bool] = []
        norm: Any = None
        for slope in (1.0, 1e36, 1.0):
            accelerator.backward(model(torch.tensor([slope])))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9) if slope == 1.0 else torch.zeros(())
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        weights = accelerator.get_state_dict(model)
        whole = [value.tolist() for value in weights.values() if accelerator.is_main_process]
        scale = accelerator.scaler.get_scale()
        accelerator.free_memory()
        return skipped, scale, norm.item(), whole

    def all_stages() -> list[Any]:
        return [body(stage) for stage in (1, 2, 3)]

    first, second = run_forked(all_stages, (), 2, timeout=100)
    for results in (first, second):
        for skipped, scale, norm, _ in results:
            assert (skipped, scale) == ([False, True, False], 2.0**15)
            assert norm == pytest.approx(4.0)
    assert [whole for *_, whole in first] == [[[-1.0] * 8] * 2] * 3


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_file_of_the_handbook_trains_in_fp16() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    rows = torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(0))

    def body(config: dict[str, Any] | None) -> list[float]:
        plugin = None if config is None else DeepSpeedPlugin(config)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        torch.manual_seed(0)
        network = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))
        kind: Any = torch.optim.AdamW if plugin is None else DummyOptim
        optimizer = kind(network.parameters(), lr=0.01, weight_decay=0.1)
        if plugin is None:
            schedule: Any = LambdaLR(optimizer, lambda step: float(step >= 2))  # of 4 steps, DeepSpeed's
        else:
            schedule = DummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=2)
        loader = DataLoader(TensorDataset(rows), batch_size=2)
        model, optimizer, loader, schedule = accelerator.prepare(network, optimizer, loader, schedule)
        losses: list[float] = []
        for _ in range(2):
            for (tokens,) in loader:
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if plugin is not None:
            assert (plugin.filled["train_batch_size"], plugin.filled["scheduler.params.warmup_min_lr"]) == (4, 0)
        return losses

    def both() -> list[list[float]]:
        expected = body(None)
        AcceleratorState._reset_state(reset_partial_state=True)
        return [expected, body(HANDBOOK)]

    for expected, losses in run_forked(both, num_processes=2, timeout=100):
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(expected, rel=1e-2)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_checkpoint_of_deepspeeds_format_is_saved_and_joined(tmp_path: Path) -> None:
    def body(stage: int) -> Any:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        network = sharded.stack(Flat)
        model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert model.save_checkpoint(tmp_path / str(stage), "mine", {"step": 2})
        accelerator.wait_for_everyone()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    for stage in (1, 3):
        expected = run_forked(body, (stage,), 2, timeout=100)[0]
        weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / str(stage))
        assert set(weights) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_nvme_is_refused_before_a_model_is_built() -> None:
    fields: dict[str, Any] = {"offload_param_device": "nvme", "offload_param_nvme_path": "/disk"}
    with pytest.raises(UnsupportedError, match="offloads to NVMe"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, **fields))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_an_optimizer_that_reads_whole_weights_is_warned_of() -> None:
    def body() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("trainer_lib.strategies.deepspeed.deepspeed").addHandler(handler)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        for kind in (torch.optim.AdamW, torch.optim.Adafactor):
            model = nn.Linear(4, 2)
            accelerator.prepare(model, kind(model.parameters()))
        return said

    for said in run_forked(body, num_processes=1, timeout=100):
        assert [line.split(":")[0] for line in said] == [
            "Adafactor reads norms or factors of whole weights, and DeepSpeed gives it shards"
        ]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_through_several_forwards_has_the_gradients_of_one_process(stage: int) -> None:
    def loss_of(model: Any, inputs: Tensor) -> Tensor:
        return (model(inputs) - model(inputs.flip(1))).square().mean() + model(inputs + 1).square().mean()

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body() -> dict[str, Tensor]:
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage)
        )
        model, optimizer = accelerator.prepare(*built())
        for part in inputs:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, part))
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    inputs = torch.arange(48.0).view(4, 3, 4) / 48
    alone, optimizer = built()
    for number, part in enumerate(inputs):
        (loss_of(alone, part) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    state = run_forked(body, num_processes=2, timeout=100)[0]
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clipping", [0.5, None])
def test_the_config_clips_at_stage_0_too(clipping: float | None) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    inputs = torch.arange(8.0).view(2, 4)
    plugin = DeepSpeedPlugin({"gradient_clipping": clipping, "zero_optimization": {"stage": 0}})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    model, optimizer = accelerator.prepare(*built())
    for part in inputs:
        with accelerator.accumulate(model):
            accelerator.backward(model(part).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    alone, reference = built()
    for part in inputs:
        (alone(part).square().sum() / 2).backward()
    if clipping is not None:
        assert nn.utils.clip_grad_norm_(alone.parameters(), clipping) > 2 * clipping
    reference.step()
    torch.testing.assert_close(accelerator.get_state_dict(model), dict(alone.state_dict()))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_each_model_follows_the_plugin_that_was_active_when_it_was_prepared() -> None:
    def body() -> tuple[float, str]:
        plugins = {
            "clipped": DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5),
            "free": DeepSpeedPlugin(zero_stage=3),
            "whole": DeepSpeedPlugin(zero_stage=0),
        }
        accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
        model = nn.Linear(4, 3)
        before = [value.clone() for value in model.state_dict().values()]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.state.select_deepspeed_plugin("free")
        accelerator.backward(model(torch.ones(1, 4)).sum() * 100)
        optimizer.step()
        state: dict[str, Tensor] = accelerator.get_state_dict(model)
        changes = [new - old for new, old in zip(state.values(), before, strict=True)]
        accelerator.state.select_deepspeed_plugin("whole")
        other = nn.Linear(4, 3)
        with pytest.raises(UnsupportedError) as caught:
            accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
        return torch.cat([change.flatten() for change in changes]).norm().item(), str(caught.value)

    norm, refused = run_forked(body, num_processes=1, timeout=100)[0]
    assert norm == pytest.approx(0.5, rel=1e-5)
    assert "trains with a DeepSpeedPlugin of zero_stage=0, and others in deepspeed_plugins shard" in refused


MISSPELT: dict[str, dict[str, Any]] = {
    "zero_optimization in the DeepSpeed config has 'overlap_com', which .* Did you mean 'overlap_comm'": {
        "zero_optimization": {"stage": 2, "overlap_com": True}
    },
    "zero_optimization.offload_optimizer in the DeepSpeed config has 'pin_mem', .* mean 'pin_memory'": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_mem": True}}
    },
    "zero_optimization.reduce_bucket_size in the DeepSpeed config: .* valid integer.* .got 'large'": {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}
    },
    "csv_monitor in the DeepSpeed config has 'fold', which .* Known: enabled, job_name, output_path": {
        "csv_monitor": {"fold": "logs"}
    },
    "fp16 in the DeepSpeed config has 'loss_scal', .* mean 'loss_scale'": {"fp16": {"enabled": "auto", "loss_scal": 0}},
    "The DeepSpeed config has 'activation_checkpointng'. Did you mean 'activation_checkpointing'": {
        "activation_checkpointng": {}
    },
    "refuses the config: .* has been removed; the standalone .eigenvalue. ": {"eigenvalue": {"enabled": True}},
}
UNREAD: dict[str, dict[str, Any]] = {
    "activation_checkpointing .* 'partition_activation', which DeepSpeed .* mean 'partition_activations'": {
        "activation_checkpointing": {"partition_activation": True, "cpu_checkpointing": False}
    },
    "The DeepSpeed config has 'of_a_newer_version', which DeepSpeed .* does not read": {"of_a_newer_version": 1},
}
KNOWN: tuple[dict[str, Any], ...] = (
    HANDBOOK,
    {"zero_optimization": {"stage": 3, "sub_group_size": 1e9, "offload_param": {"device": "cpu", "pin_memory": True}}},
    {"_comment": 1, "zero_allow_untested_optimizer": True, "flops_profiler": {"enabled": False, "top_modules": 1}},
    {"autotuning": {"enabled": False, "fast": True}, "aio": {"block_size": 1024}, "data_types": {}, "amp": {"x": 1}},
    {"sequence_parallel_size": 1, "bf16": {"enabled": "auto"}, "scheduler": None, "communication_data_type": "fp32"},
)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_keys_that_the_installed_deepspeed_does_not_know_are_named() -> None:
    def body() -> tuple[list[str], list[str]]:
        warned: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logging.getLogger("trainer_lib.strategies.deepspeed.config_keys").addHandler(handler)
        refused: list[str] = []
        for config in (*KNOWN, *MISSPELT.values(), *UNREAD.values()):
            plugins = {"first": DeepSpeedPlugin(zero_stage=2), "second": DeepSpeedPlugin(config)}
            try:
                Accelerator(cpu=True, deepspeed_plugins=plugins)
            except ConfigurationError as error:
                refused.append(str(error))
            AcceleratorState._reset_state(reset_partial_state=True)
        return refused, warned

    refused, warned = run_forked(body, num_processes=1, timeout=100)[0]
    for expected, said in ((MISSPELT, refused), (UNREAD, warned)):
        assert len(said) == len(expected), said
        assert [text for part, text in zip(expected, said, strict=True) if not re.search(part, text)] == []


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_with_a_state_from_the_start_trains_and_resumes(stage: int, tmp_path: Path) -> None:
    def groups(model: nn.Module) -> Any:
        return [{"params": [model.get_parameter("weight")], "lr": 0.5}, {"params": [model.get_parameter("bias")]}]

    def steps(model: nn.Module, optimizer: Any, backward: Any, count: int) -> None:
        for _ in range(count):
            backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, torch.optim.Adagrad(groups(model), lr=0.1, initial_accumulator_value=0.5)

    def body() -> list[dict[str, Tensor]]:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model, optimizer = accelerator.prepare(*built())
        steps(model, optimizer, accelerator.backward, 2)
        accelerator.save_state(str(tmp_path / "saved"))
        steps(model, optimizer, accelerator.backward, 2)
        trained = accelerator.get_state_dict(model)
        accelerator.load_state(str(tmp_path / "saved"))
        steps(model, optimizer, accelerator.backward, 2)
        return [trained, accelerator.get_state_dict(model)]

    inputs = torch.arange(8.0).view(2, 4) / 8
    alone, optimizer = built()
    steps(alone, optimizer, lambda loss: loss.backward(), 4)
    trained, resumed = run_forked(body, num_processes=2, timeout=100)[0]
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained[name], resumed[name])


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offloads", [False, True])
def test_shards_in_another_order_are_saved_and_loaded_under_the_right_names(
    stage: int, offloads: bool, tmp_path: Path
) -> None:
    def body(is_reordered: bool) -> list[Any]:
        zero: dict[str, Any] = {"stage": stage, "round_robin_gradients": is_reordered}
        plugin = DeepSpeedPlugin({"zero_optimization": zero}, offload_optimizer_device="cpu" if offloads else None)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        network = sharded.stack(Flat)
        model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.01))
        states: list[Any] = []
        for step in range(4):
            accelerator.backward(model(torch.arange(16.0).view(2, 8) / 16).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                accelerator.save_state(str(tmp_path / "saved"))
                states.append(accelerator.strategy.optimizer_state(optimizer.optimizer, [model]).get("state"))
                accelerator.load_state(str(tmp_path / "saved"))
        states.append(accelerator.get_state_dict(model))
        accelerator.free_memory()
        return states

    (state, weights), _ = run_forked(body, (True,), num_processes=2, timeout=100)
    (expected_state, expected), _ = run_forked(body, (False,), num_processes=2, timeout=100)
    for name, values in expected_state.items():
        for key, value in values.items():
            torch.testing.assert_close(state[name][key], value, rtol=1e-5, atol=1e-7)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_model_prepared_without_an_optimizer_runs_in_evaluation_mode() -> None:
    inputs = torch.arange(32.0).view(8, 4)

    def predictions() -> Tensor:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
        torch.manual_seed(0)
        model, loader = accelerator.prepare(nn.Linear(4, 2), DataLoader(TensorDataset(inputs), batch_size=2))
        model.eval()
        return torch.cat([accelerator.gather_for_metrics(model(batch)).detach() for (batch,) in loader])

    torch.manual_seed(0)
    expected = nn.Linear(4, 2)(inputs).detach()
    for outputs in run_forked(predictions, num_processes=2, timeout=100):
        torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_misuse_is_refused_in_words() -> None:
    def body() -> list[str]:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        model = nn.Linear(4, 2)
        lone = accelerator.prepare(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, stepped = accelerator.prepare(model, optimizer)
        layer = nn.Linear(4, 2, bias=False)
        weightless = nn.Linear(2, 1)
        weightless.scale = nn.Parameter(torch.tensor(1.0))
        messages: list[str] = []
        for call in (
            lambda: lone(torch.ones(1, 4)),
            lambda: accelerator.prepare(torch.optim.SGD([model.weight])),
            lambda: accelerator.prepare(layer, torch.optim.Muon(layer.parameters())),
            lambda: accelerator.clip_grad_norm_([model.weight], 1.0),
            lambda: accelerator.prepare(weightless, torch.optim.SGD(weightless.parameters(), 0.1)),
            lambda: stepped.step(lambda: None),
            lambda: accelerator.join_uneven_inputs([prepared]).__enter__(),
        ):
            try:
                call()
            except (PreparationError, UnsupportedError) as error:
                messages.append(str(error))
        return messages

    expected = (
        "its optimizer was not: DeepSpeed needs both to train",
        "second optimizer of one Linear",
        "Muon updates matrices, and DeepSpeed gives optimizers shards as vectors. Shard with FSDP",
        "1 of the 2 trained parameters were left out",
        "scale is a weight without dimensions",
        "optimizer.step(closure) does not work with DeepSpeed",
        "join_uneven_inputs does not work with DeepSpeed",
    )
    for messages in run_forked(body, num_processes=2, timeout=100):
        assert [part for part, text in zip(expected, messages, strict=True) if part not in text] == []
