"""Runs in bfloat16 throughout: numbers, logs, evaluations, the guard, averages of weights, and resuming."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from tests.callbacks.by_hand import BATCH, OPTIONS, assert_equal, batches, loop, trained, weights
from tests.faults.trainings import Dies
from tests.trainer.checkpoints.test_resume import run as resumable
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin, Trainer
from trainer_lib.callbacks import EMA
from trainer_lib.events import Callback, Run

BF16 = torch.bfloat16
UNIT = 2.0**-8  # what rounding to bfloat16 changes a number by, at most
TRUE: dict[str, Any] = {"mixed_precision": "bf16-true"}


def _loss(model: nn.Module, step: int, batch: tuple[Tensor, Tensor]) -> Tensor:
    del step
    return cross_entropy(model(batch[0].to(BF16)).float(), batch[1])


def test_a_run_is_the_loop_by_hand_to_the_bit() -> None:
    expected = weights(loop(network().to(BF16), _loss))
    assert_equal(trained(**TRUE), expected)
    assert_equal(trained(model=network().to(BF16), **TRUE), expected)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_accumulated_and_clipped_on_two_processes_as_on_one(sharded: bool) -> None:
    options: dict[str, Any] = {**TRUE, "max_grad_norm": 0.5}
    expected = trained(**options)
    two: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def body() -> Any:
        return trained(**options, **two, fsdp=FullyShardedDataParallelPlugin() if sharded else None)

    first, second = run_world(body, (), 2, timeout=60)
    assert_equal(first, second)
    for name, value in expected.items():
        assert first[name].dtype is BF16
        # Ten updates, each of which may end on the neighbour of a number: about √10 spacings.
        spacing = 2.0 ** (value.float().abs().max().log2().floor() - 7)
        assert float((first[name].float() - value.float()).abs().max()) <= 3 * spacing, name


def test_the_logged_loss_is_a_mean_in_more_than_bfloat16() -> None:
    losses: list[float] = []

    def remembered(model: nn.Module, step: int, batch: Any) -> Tensor:
        loss = _loss(model, step, batch)
        losses.append(loss.item())
        return loss

    loop(network().to(BF16), remembered)
    model_trainer = trainer(arguments(**OPTIONS, **TRUE, log_every=5, per_device_train_batch_size=BATCH))
    logged = [entry["loss"] for entry in model_trainer.fit().history if "loss" in entry]
    assert logged == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5], rel=1e-7)
    assert any(float(torch.tensor(loss).to(BF16)) != loss for loss in losses), "losses are more than bfloat16 too"


def test_evaluations_and_predictions_compute_as_training_does() -> None:
    model_trainer = trainer(arguments(**OPTIONS, **TRUE), eval_dataset=points(16))
    metrics = model_trainer.evaluate()
    model = network().to(BF16)
    inputs, targets = points(16)
    with torch.no_grad():
        scores = model(inputs.to(BF16)).float()
    assert metrics["eval_loss"] == pytest.approx(float(cross_entropy(scores, targets)), rel=1e-6)
    predicted = torch.as_tensor(model_trainer.predict(points(16)).predictions)
    assert predicted.dtype is torch.float32
    assert torch.equal(predicted, scores)


def test_an_update_that_is_not_finite_is_skipped() -> None:
    inputs, targets = points()
    spoiled = inputs.clone()
    spoiled[9] = float("inf")
    without = [batch for index, batch in enumerate(batches()) if index % 5 != 1]  # the second of each pass
    expected = weights(loop(network().to(BF16), _loss, seen=without))
    assert_equal(trained(train_dataset=(spoiled, targets), on_nonfinite="skip", **TRUE), expected)


class Types(Callback):
    """Notes the types of an average beside the model."""

    def __init__(self, average: EMA) -> None:
        self.average, self.types = average, set[torch.dtype]()

    def on_step_end(self, run: Run) -> None:
        self.types |= {value.dtype for value in self.average._averages}


def test_an_average_of_weights_is_kept_in_float32() -> None:
    average = EMA(0.5, warmup=False)
    types = Types(average)
    actual = trained(average, types, **TRUE)
    assert types.types == {torch.float32}
    kept = [p.detach().float() for p in network().to(BF16).parameters()]

    def after(model: nn.Module, step: int) -> None:
        del step
        for value, parameter in zip(kept, model.parameters(), strict=True):
            value.lerp_(parameter.detach().float(), 0.5)

    loop(network().to(BF16), _loss, after=after)
    for value, (name, tensor) in zip(kept, actual.items(), strict=True):
        assert torch.equal(tensor, value.to(BF16)), name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_died_is_resumed_to_the_bit(ranks: int, tmp_path: Path) -> None:
    def body() -> bool:
        whole = resumable(tmp_path / "whole", TRUE, points())
        assert resumable(tmp_path / "parts", TRUE, points(), dies_at=7) is None
        return whole is not None and resumable(tmp_path / "parts", TRUE, points(), resume="auto") == whole

    assert run_world(body, (), ranks, timeout=60) == [True] * ranks


class FullMomentum(Optimizer):
    """Keeps momentum and a copy of the weights in float32, for weights of any type."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["whole"] = parameter.detach().float().clone()
                assert {value.dtype for value in state.values()} == {torch.float32}
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                parameter.copy_(state["whole"].add_(state["momentum"], alpha=-group["lr"]))


def test_states_in_float32_are_resumed_in_float32(tmp_path: Path) -> None:
    options: dict[str, Any] = {**TRUE, "optimizer": f"{__name__}.FullMomentum", "shuffle": True}
    whole = trained(**options)
    with contextlib.suppress(InterruptedError):
        trained(Dies(7), **options, output_dir=tmp_path, save_every=2)
    assert_equal(trained(**options, output_dir=tmp_path, resume="auto"), whole)


@pytest.mark.parametrize(("before", "now"), [("bf16-true", "no"), ("no", "bf16-true")])
def test_another_precision_at_resume_is_told(
    before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumable(tmp_path, {"mixed_precision": before}, points(), dies_at=7)
    assert resumable(tmp_path, {"mixed_precision": now}, points(), resume="auto") is not None
    assert f"mixed_precision: {before!r} → {now!r}" in caplog.text


def test_the_saved_model_and_the_banner_are_of_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    model_trainer = trainer(arguments(progress_bar=True, **TRUE))
    model_trainer.fit()
    assert "1 process on cpu, bf16-true" in capsys.readouterr().err
    model_trainer.save_model(tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {BF16}


def test_a_compiled_model_takes_float32_too() -> None:
    assert_equal(trained(compile="eager", **TRUE), trained(**TRUE))


def test_weights_in_bfloat16_and_inputs_in_float32_name_the_precision_that_joins_them() -> None:
    with pytest.raises(RuntimeError) as caught:
        Trainer(network().to(BF16), arguments(), train_dataset=points(), loss_fn=cross_entropy).fit()
    assert 'mixed_precision="bf16-true" casts the inputs' in "".join(caught.value.__notes__)
