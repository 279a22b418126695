"""Mixed precision on shards: computing in 16 bits, sums in 32, and a scaler that all processes agree on."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.strategies.sharded import SAMPLES, Block, Case, stack, train
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs


class _Types(nn.Module):
    """Notes in which types it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 3)
        self.seen: set[Any] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inside(inputs)
        self.seen |= {inputs.dtype, self.inside.weight.dtype, outputs.dtype}
        return outputs


def _types(precision: str, policy: Any) -> list[Any]:
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    )
    network = accelerator.prepare(_Types())
    outputs = network(torch.ones(2, 8))
    accelerator.backward(outputs.square().mean())
    gradient: Any = next(network.parameters()).grad
    dtypes = [network.seen, outputs.dtype, gradient.dtype, next(network.parameters()).dtype]
    accelerator.free_memory()
    return dtypes


def test_types_follow_the_precision_and_the_policy() -> None:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    bf16, fp32 = torch.bfloat16, torch.float32
    expected = [
        (("no", None), {fp32}, fp32),
        (("bf16", None), {bf16}, fp32),
        (("fp16", None), {torch.float16}, fp32),
        (("no", "bf16"), {bf16}, bf16),
        (("no", {"param_dtype": "bf16", "output_dtype": torch.float32}), {bf16}, fp32),
        (("no", MixedPrecisionPolicy(param_dtype=bf16, output_dtype=fp32)), {bf16}, fp32),
        (("no", MixedPrecision(param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=True)), {bf16}, bf16),
    ]

    def all_types() -> list[Any]:
        return [_types(*settings) for settings, _, _ in expected]

    for result in run_world(all_types, (), 2, timeout=60):
        for dtypes, (_, seen, output) in zip(result, expected, strict=True):
            assert dtypes == [seen, output, fp32, fp32], "gradients and weights stay in fp32"


BF16 = {
    "by name": Case(precision="bf16"),
    "by policy": Case(plugin={"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}, clip=None),
    "accumulated": Case(precision="bf16", steps=2),
    "checkpointed": Case(precision="bf16", plugin={"activation_checkpointing": True}),
}


def _by_hand() -> list[float]:
    """Train as the case "by policy" does, with FSDP2 as its authors write it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    accelerator = Accelerator(cpu=True)
    network: Any = stack()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = {network.scale}
    for block in network.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(network, mp_policy=policy, ignored_params=whole)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    inputs, targets, _ = toy.data()
    losses: list[float] = []
    for start in range(0, SAMPLES, 8):
        rows = slice(start + 4 * accelerator.process_index, start + 4 * accelerator.process_index + 4)
        loss = toy.losses(network, inputs[rows], targets[rows]).mean()
        loss.backward()
        accelerator.group.all_reduce(network.scale.grad).div_(2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses


@pytest.mark.slow
def test_bf16_is_that_of_fsdp2_and_near_one_process() -> None:
    def all_cases(shards: bool) -> dict[str, Any]:
        return {name: train(case, shards, epochs=1)["losses"] for name, case in BF16.items()}

    (alone,) = run_world(all_cases, (False,), 1, timeout=60)
    for result in (together := run_world(all_cases, (True,), 2, timeout=60)):
        for name in BF16:
            assert result[name] == pytest.approx(alone[name], rel=2e-2), name
        assert result["checkpointed"] == result["by name"]
    assert together[0]["by policy"] == run_world(_by_hand, (), 2, timeout=60)[0]


def _overflow(plugin: dict[str, Any], fused: bool, spikes: bool) -> list[Any]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    network = stack()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=fused)
    network, optimizer = accelerator.prepare(network, optimizer)
    inputs, targets, _ = toy.data()
    values: list[Any] = []
    for start in range(0, 32, 8):
        rows = slice(start + 4 * accelerator.process_index, start + 4 * accelerator.process_index + 4)
        loss = toy.losses(network, inputs[rows], targets[rows]).mean()
        if spikes and start == 8 and accelerator.is_last_process:
            # Only one of the gradients overflows, and on this process only.
            loss = loss + network.last.bias.sum() * float("inf")
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(network.parameters(), 0.5)) if start == 16 else None
        optimizer.step()
        values.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), norm))
        optimizer.zero_grad()
    values.append(accelerator.strategy.model_state(network))
    accelerator.free_memory()
    return values


@pytest.mark.parametrize("spikes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_overflow_of_one_process_skips_the_update_of_all(spikes: bool) -> None:
    settings: list[Any] = [({}, False), ({}, True), ({"ignored_modules": "last"}, False), ({"cpu_offload": True}, True)]

    def all_settings() -> list[Any]:
        return [_overflow(plugin, fused, spikes) for plugin, fused in settings]

    first, second = run_world(all_settings, (), 2, timeout=60)
    for (*steps, weights), (*others, _) in zip(first, second, strict=True):
        assert steps == others
        assert [skipped for skipped, _, _ in steps] == [False, spikes, False, False]
        # The scale moves as the next window begins.
        assert [scale for _, scale, _ in steps] == [1024.0, 1024.0, *([512.0] * 2 if spikes else [1024.0] * 2)]
        assert steps[2][2] == pytest.approx(first[0][2][2], rel=1e-3)
        toy.assert_same(list(weights.values()), list(first[0][-1].values()), rtol=1e-3)
        assert all(bool(value.isfinite().all()) for value in weights.values())


def _with_statistics(precision: str, policy: Any, shards: bool) -> tuple[list[float], list[Any]]:
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy) if shards else None
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    losses: list[float] = []
    for _ in range(4):
        # The same batch on all processes: its statistics are then those of one process too.
        loss = network(toy.data()[0][:8]).float().square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    network.eval()
    with torch.no_grad():
        losses.append(network(toy.data()[0][8:16]).float().square().mean().item())
    norm: Any = accelerator.unwrap_model(network).get_submodule("1")
    is_sharded = hasattr(norm.weight, "_local_tensor")
    weight = norm.weight.full_tensor() if is_sharded else norm.weight
    facts = [is_sharded, weight.dtype, norm.running_var.dtype, weight.sum().item()]
    accelerator.free_memory()
    return losses, facts


def _accumulated(precision: str, has_spare: bool) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    network = stack()
    if has_spare:
        network.add_module("spare", Block())
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    inputs, targets, _ = toy.data()
    for start in range(0, 16, 4):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[start : start + 4], targets[start : start + 4]).mean())
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(network)
    accelerator.free_memory()
    return {name: value.tolist() for name, value in state.items() if "spare" not in name}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_block_that_never_runs_accumulates_no_gradients(processes: int) -> None:
    def both(precision: str) -> list[Any]:
        return [_accumulated(precision, has_spare) for has_spare in (True, False)]

    for precision in ("bf16", "fp16"):
        for with_spare, without in run_world(both, (precision,), processes):
            assert with_spare == without


def test_layers_with_running_statistics_stay_in_32_bits() -> None:
    settings = [("bf16", None), ("fp16", None), ("no", "bf16"), ("no", None)]

    def all_settings(shards: bool) -> list[Any]:
        return [_with_statistics(precision, policy, shards) for precision, policy in settings]

    (alone,) = run_world(all_settings, (False,), 1, timeout=60)
    first, second = run_world(all_settings, (True,), 2, timeout=60)
    assert first == second
    for (losses, _), (rank_losses, facts), (precision, policy) in zip(alone, first, settings, strict=True):
        is_full = (precision, policy) == ("no", None)
        assert rank_losses == pytest.approx(losses, rel=1e-5 if is_full else 5e-2), (precision, policy)
        assert facts[:3] == [is_full, torch.float32, torch.float32]
