"""Runs of a Trainer on a GPU: NaN that is skipped on the device, resume, determinism, sharding with offload."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.ranks import run_on_gpus
from tests.gpu.training import train
from tests.trainer.tasks import arguments, network, trainer
from trainer_lib import NonFiniteError
from trainer_lib.events import Callback, Run
from trainer_lib.utils import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.gpu


class Watches(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_step_end(self, run: Run) -> None:
        self.weights.append(torch.cat([value.flatten() for value in run.modules[""].parameters()]).detach().cpu())


class TurnsNan(nn.Module):
    """Returns NaN in one forward."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.inner, self.left = network(), step

    def forward(self, inputs: Tensor) -> Tensor:
        self.left -= 1
        return self.inner(inputs) * (torch.nan if self.left == 0 else 1.0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_nan_never_changes_a_weight(optimizer: str) -> None:
    """A fused optimizer skips the update on the device, and the error comes with the next log."""
    watches = Watches()
    args = arguments(use_cpu=False, max_steps=8, log_every=4, optimizer=optimizer)
    with pytest.raises(NonFiniteError):
        trainer(args, model=TurnsNan(3), callbacks=[watches]).fit()
    assert all(bool(weights.isfinite().all()) for weights in watches.weights)


def test_skipped_updates_are_counted(tmp_path: Path) -> None:
    watches = Watches()
    args = arguments(use_cpu=False, max_steps=8, on_nonfinite="skip", output_dir=tmp_path)
    result = trainer(args, model=TurnsNan(3), callbacks=[watches]).fit()
    assert result.state.step == 8
    assert '"left_out"' in next(tmp_path.glob("*/history.jsonl")).read_text()
    assert all(bool(weights.isfinite().all()) for weights in watches.weights)


def fitted(folder: Path, **options: Any) -> list[Tensor]:
    args = arguments(use_cpu=False, output_dir=folder, shuffle=True, save_every=4, **options)
    fit = trainer(args, model=network(dropout=0.2))
    fit.fit()
    weights = [value.detach().cpu().clone() for value in fit.unwrapped_model.parameters()]
    fit.accelerator.free_memory()
    return weights


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_resumed_runs_are_those_that_were_not_interrupted(precision: str, tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole", max_steps=8, mixed_precision=precision)
    fitted(tmp_path / "cut", max_steps=4, mixed_precision=precision, schedule_steps=8)
    resumed = fitted(tmp_path / "cut", max_steps=8, mixed_precision=precision, schedule_steps=8, resume="extend")
    for first, second in zip(whole, resumed, strict=True):
        assert torch.equal(first, second)


def _deterministic(folder: Path) -> list[list[Tensor]]:
    return [fitted(folder / str(attempt), max_steps=8, deterministic=True) for attempt in range(2)]


def test_deterministic_runs_find_cublas_configured(tmp_path: Path) -> None:
    """torch raises in each product of matrices unless cuBLAS has workspaces of a fixed size."""
    ((first, second),) = run_on_gpus(_deterministic, tmp_path, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _sharded(offload: bool) -> tuple[list[float], str]:
    plugin = FullyShardedDataParallelPlugin(cpu_offload=offload, min_num_params=2000)
    report = train(torch.optim.AdamW, fsdp_plugin=plugin)
    return report.losses, report.backend


@pytest.mark.parametrize("offload", [False, True])
def test_sharding_works_in_a_world_of_one(offload: bool, tmp_path: Path) -> None:
    ((losses, backend),) = run_on_gpus(_sharded, tmp_path, offload)
    assert "nccl" in backend
    assert losses == pytest.approx(train(torch.optim.AdamW).losses, rel=1e-4)
