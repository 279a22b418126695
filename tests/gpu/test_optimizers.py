"""Optimizers on a GPU: fused and capturable ones, what stays on the device, and bitwise resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.gpu.training import Report, network, train

pytestmark = pytest.mark.gpu

Make = Callable[[Any], Optimizer]
KINDS: dict[str, Make] = {
    "fused": lambda parameters: AdamW(parameters, lr=3e-3, fused=True),
    "foreach": lambda parameters: AdamW(parameters, lr=3e-3, foreach=True),
    "capturable": lambda parameters: AdamW(parameters, lr=3e-3, foreach=True, capturable=True),
    "fused Adam": lambda parameters: Adam(parameters, lr=3e-3, fused=True),
    "fused SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def assert_close(actual: Report, expected: Report, rtol: float) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=rtol)
    assert actual.norms == pytest.approx(expected.norms, rel=rtol)


@pytest.mark.parametrize("name", KINDS)
def test_training_is_that_of_the_cpu(name: str) -> None:
    on_gpu = train(KINDS[name])
    assert on_gpu.device == "cuda"
    on_cpu = train(KINDS["foreach" if name in ("fused", "capturable") else name], cpu=True)
    assert_close(on_gpu, on_cpu, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_runs_resume_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole = train(KINDS[name], model=network(dropout=0.2), save=tmp_path / "state")
    resumed = train(KINDS[name], model=network(dropout=0.2), load=tmp_path / "state")
    assert resumed.losses == whole.losses[4:]
    for key, value in whole.weights.items():
        assert torch.equal(value, resumed.weights[key]), key


def test_a_state_of_a_gpu_is_loaded_on_the_cpu_and_back(tmp_path: Path) -> None:
    whole = train(save=tmp_path / "gpu")
    on_cpu = train(load=tmp_path / "gpu", cpu=True)
    assert on_cpu.losses == pytest.approx(whole.losses[4:], rel=1e-4)
    train(save=tmp_path / "cpu", cpu=True)
    on_gpu = train(load=tmp_path / "cpu")
    assert on_gpu.losses == pytest.approx(whole.losses[4:], rel=1e-4)


@pytest.mark.parametrize("name", ["fused", "capturable"])
def test_counts_of_steps_stay_on_the_gpu_when_a_state_is_loaded(name: str) -> None:
    """Fused and capturable optimizers count their steps on the device."""
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizers = [KINDS[name]([parameter]) for _ in range(2)]
    parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    state: Any = optimizers[0].state_dict()
    state["state"][0] = {key: value.cpu() for key, value in state["state"][0].items()}
    optimizers[1].load_state_dict(state)
    assert {value.device.type for value in optimizers[1].state[parameter].values()} == {"cuda"}
    optimizers[1].step()


def test_the_fused_kernel_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
    assert any("FusedAdam" in event.key for event in profile.key_averages())
