"""Precisions on a GPU: bf16, fp16 with its scaler, bf16 weights, fp8 in hardware, and TF32."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.gpu.training import train
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib.options.fp8_options import AORecipeKwargs, TERecipeKwargs
from trainer_lib.options.precision_options import GradScalerKwargs
from trainer_lib.processes.gpu_info import check_cuda_fp8_capability

pytestmark = pytest.mark.gpu


def _of_an_age(major: int) -> bool:
    return torch.cuda.get_device_capability() >= (major, 0)


@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "fp16"])
def test_16_bits_are_close_to_fp32(precision: str) -> None:
    options: dict[str, Any] = {"kwargs_handlers": [GradScalerKwargs(init_scale=1024.0)]} if precision == "fp16" else {}
    report = train(mixed_precision=precision, **options)
    assert report.device == "cuda"
    assert not any(report.skipped)
    expected = train(mixed_precision="no").losses
    assert report.losses == pytest.approx(expected, abs=5e-2 if precision == "bf16-true" else 2e-2)
    assert report.losses != expected


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_skips_updates_that_overflow_and_halves_the_scale(fused: bool) -> None:
    """A fused optimizer skips on the device, the other one is not called: the weights are the same."""
    scaler = GradScalerKwargs(init_scale=2.0**40, growth_interval=10_000)

    def adamw(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=3e-3, fused=fused)

    report = train(adamw, steps=32, mixed_precision="fp16", kwargs_handlers=[scaler])
    skips = sum(report.skipped)
    assert 0 < skips < 32
    assert report.skipped == [True] * skips + [False] * (32 - skips), "each one halves the scale, until it fits"
    assert report.losses[-1] < report.losses[0]
    assert all(bool(value.isfinite().all()) for value in report.weights.values())


def test_fp8_multiplies_in_hardware() -> None:
    if not check_cuda_fp8_capability():
        pytest.skip("this GPU does not compute in fp8 (Ada, Hopper or later)")
    pytest.importorskip("torchao")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        report = train(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert report.losses == pytest.approx(train(mixed_precision="bf16").losses, abs=2e-2)
    assert any("_scaled_mm" in event.key for event in profile.key_averages())


def test_transformer_engine_trains() -> None:
    pytest.importorskip("transformer_engine")
    if not check_cuda_fp8_capability():
        pytest.skip("this GPU does not compute in fp8 (Ada, Hopper or later)")
    report = train(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], steps=16)
    assert report.losses[-1] < report.losses[0]


class Rounds(nn.Module):
    """Keeps how far a product in fp32 is from the exact one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.error = 0.0

    def forward(self, inputs: Tensor) -> Any:
        matrix = torch.arange(256 * 256, device=inputs.device).sin().reshape(256, 256)
        exact = matrix.double() @ matrix.double()
        self.error = float((matrix @ matrix - exact).abs().max() / exact.abs().max())
        return self.inner(inputs)


def test_tf32_is_used_only_if_it_is_asked_for() -> None:
    if not _of_an_age(8):
        pytest.skip("this GPU has no TF32 (Ampere or later)")
    errors: list[float] = []
    for tf32 in (True, False):
        model = Rounds()
        trainer(arguments(use_cpu=False, tf32=tf32, max_steps=1), model=model, train_dataset=points(8)).fit()
        errors.append(model.error)
    with_tf32, without = errors
    assert with_tf32 > 1e-5 > without
