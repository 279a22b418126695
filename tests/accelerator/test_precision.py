"""Mixed precision: what runs in which type, and updates that overflow."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    ConfigurationError,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    UnsupportedError,
)


class Spy(nn.Module):
    """A layer that remembers the type it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        self.seen = outputs.dtype
        return {"outputs": outputs, "labels": torch.zeros(1, dtype=torch.long)}


@pytest.mark.parametrize(("name", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_computes_in_the_type_and_returns_fp32(name: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    network = accelerator.prepare(Spy())
    outputs = network(torch.ones(2, 4))
    assert network.seen is dtype
    assert outputs["outputs"].dtype is torch.float32
    assert outputs["labels"].dtype is torch.long
    assert next(network.parameters()).dtype is torch.float32


def test_the_launcher_may_name_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"


def test_autocast_covers_arithmetic_outside_the_model() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    layer = nn.Linear(2, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert layer(torch.ones(1, 2)).dtype is torch.float32


def test_autocast_can_be_switched_off_by_its_options() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    network = accelerator.prepare(Spy())
    network(torch.ones(2, 4))
    assert network.seen is torch.float32


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_native_amp_switches_autocast_off(name: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    assert accelerator.native_amp is True
    accelerator.native_amp = False
    network = accelerator.prepare(Spy())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of the script
        assert network(torch.ones(2, 4))["outputs"].dtype is torch.bfloat16
    assert network(torch.ones(2, 4))["outputs"].dtype is torch.float32
    assert network.seen is torch.float32
    with accelerator.autocast(AutocastKwargs()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_native_amp_is_refused_where_it_would_have_no_effect() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = False  # as it is
    with pytest.raises(ConfigurationError, match="native_amp=True does not work with mixed_precision='no'"):
        accelerator.native_amp = True
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(Spy())
    with pytest.raises(ConfigurationError, match="Set it before prepare"):
        accelerator.native_amp = False


def test_options_of_autocast_can_be_replaced_for_models_that_are_prepared_afterwards() -> None:
    given = AutocastKwargs(cache_enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[given])
    assert accelerator.autocast_handler is given
    before = accelerator.prepare(Spy())
    accelerator.autocast_handler = off = AutocastKwargs(enabled=False)
    assert accelerator.autocast_handler is off
    after = accelerator.prepare(Spy())
    for network in (before, after):
        network(torch.ones(2, 4))
    assert (before.seen, after.seen) == (torch.bfloat16, torch.float32)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    accelerator.autocast_handler = None
    assert accelerator.autocast_handler is None
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with pytest.raises(ConfigurationError, match="autocast_handler must be AutocastKwargs"):
        accelerator.autocast_handler = {"enabled": False}  # pyright: ignore[reportAttributeAccessIssue]


def test_handlers_can_be_read_from_the_accelerator() -> None:
    scaler, group = GradScalerKwargs(init_scale=8.0), InitProcessGroupKwargs(timeout=timedelta(seconds=90))
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler, group])
    assert accelerator.scaler_handler is scaler
    assert accelerator.init_handler is group
    assert accelerator.autocast_handler is None
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    assert accelerator.scaler_handler is accelerator.init_handler is None


def test_a_scaler_that_is_off_may_be_set_where_losses_are_not_scaled() -> None:
    accelerator = Accelerator(cpu=True)
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        accelerator.scaler = scaler
        assert accelerator.scaler is None
    with pytest.raises(
        ConfigurationError, match=r"must be None or GradScaler\(enabled=False\).*mixed_precision='fp16'"
    ):
        accelerator.scaler = torch.amp.GradScaler("cpu")


def test_the_scaler_of_fp16_cannot_be_replaced() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = kept = accelerator.scaler
    for scaler in (None, torch.amp.GradScaler("cpu")):
        with pytest.raises(ConfigurationError, match=r"cannot be replaced \(got .*GradScalerKwargs"):
            accelerator.scaler = scaler
    assert accelerator.scaler is kept


def test_unwrapping_gives_the_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    spy = Spy()
    network = accelerator.prepare(spy)
    assert accelerator.unwrap_model(network) is spy
    spy(torch.ones(2, 4))
    assert spy.seen is torch.bfloat16
    accelerator.unwrap_model(network, keep_fp32_wrapper=False)
    spy(torch.ones(2, 4))
    assert spy.seen is torch.float32
    assert "forward" not in vars(spy)


def _fp16_run(overflow_at: int, fused: bool, clip: bool) -> list[tuple[bool, float, float, float]]:
    """Train four updates; one overflows on the last process only. Return skip, scale, first weight and rate of each."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=2)],
    )
    network = toy.model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    inputs, targets, _ = toy.data()
    messages = []
    for update in range(4):
        loss = toy.losses(network, inputs, targets).mean()
        if update == overflow_at and accelerator.is_last_process:
            loss = loss * float("inf")
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        weight = float(next(iter(network.parameters())).detach().flatten()[0])
        messages.append(
            (accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale(), weight, schedule.get_last_lr()[0])
        )
    return messages


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_overflows_is_skipped_everywhere(processes: int, fused: bool, clip: bool) -> None:
    results = run_world(_fp16_run, (1, fused, clip), processes, timeout=60)
    assert all(result == results[0] for result in results)
    skipped, scales, weights, rates = zip(*results[0], strict=True)
    assert skipped == (False, True, False, False)
    assert weights[1] == weights[0] != weights[2]
    assert rates[1] == rates[0], "a skipped update must not move the schedule"
    assert rates[2] < rates[1]
    # The scale moves before the next backward: halved by the overflow, doubled by two good updates in a row.
    assert scales == (1024.0, 1024.0, 512.0, 512.0)


def test_fp16_trains_like_fp32() -> None:
    def run(precision: str) -> list[torch.Tensor]:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        network = toy.model()
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.05))
        inputs, targets, _ = toy.data()
        for _ in range(5):
            accelerator.backward(toy.losses(network, inputs, targets).mean())
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
        return toy.parameters(network)

    reference = run("no")
    toy.assert_same(run("fp16"), reference, rtol=2e-3)
    toy.assert_same(run("bf16"), reference, rtol=2e-2)


def test_the_scale_does_not_move_while_another_optimizer_holds_gradients() -> None:
    """Two optimizers in turn, accumulation 2: the first one's overflow must not change the second one's scale."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    left, other = toy.model(), toy.model()
    left, other, first, second = accelerator.prepare(
        left, other, torch.optim.SGD(left.parameters(), lr=0.0), torch.optim.SGD(other.parameters(), lr=0.0)
    )
    inputs, targets, _ = toy.data()
    for _ in range(2):
        with accelerator.accumulate(left, other):
            accelerator.backward(toy.losses(left, inputs, targets).mean() * float("inf"))
            first.step()
            accelerator.backward(toy.losses(other, inputs, targets).mean())
            second.step()
    assert first.step_was_skipped
    assert not second.step_was_skipped
    toy.assert_same(toy.gradients(other), toy.mean_gradients(list(range(toy.SAMPLES))), rtol=5e-3)


def test_the_scaler_keeps_its_state() -> None:
    handlers = [GradScalerKwargs(init_scale=256.0, growth_interval=1)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    accelerator.backward(network(torch.ones(1, 8)).sum())
    optimizer.step()
    state = accelerator.precision.state_dict()
    assert state["scale"] == 2 * 256.0, "the update that is due counts"
    accelerator.precision.load_state_dict({**state, "scale": 8.0})
    assert accelerator.scaler.get_scale() == 8.0


def test_gradients_are_unscaled_once() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    accelerator.backward(toy.losses(network, inputs, targets).mean())
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    accelerator.clip_grad_value_(network.parameters(), 1e9)
    accelerator.clip_grad_norm_(network.parameters(), 1e9)
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(toy.SAMPLES))), rtol=5e-3)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_a_model_may_update_twice_while_another_one_holds_gradients_in_fp16() -> None:
    scaler = GradScalerKwargs(init_scale=256.0, growth_interval=1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[scaler])
    often, rare = toy.model(0), toy.model(1)
    often, rare, first, second = accelerator.prepare(
        often, rare, torch.optim.SGD(often.parameters(), lr=0.1), torch.optim.SGD(rare.parameters(), lr=0.1)
    )

    def train(network: Any, optimizer: Any, scale: float = 1.0) -> None:
        with accelerator.accumulate(network):
            accelerator.backward(network(torch.ones(1, 8)).sum() * scale)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    train(rare, second)
    before = toy.parameters(often)
    for _ in range(2):  # the second one with a gradient that overflows
        train(often, first)
    updated = toy.parameters(often)
    for scale in (1.0, float("inf")):
        train(often, first, scale)
    assert accelerator.scaler.get_scale() == 256.0  # of the gradients that the other model holds
    assert not torch.equal(updated[0], before[0])
    assert first.step_was_skipped
    assert torch.equal(toy.parameters(often)[0], updated[0])
    train(rare, second)
    assert not second.step_was_skipped
    train(often, first)
    assert accelerator.scaler.get_scale() == 128.0  # one of the three updates overflowed


def test_fp16_weights_cannot_be_trained_in_fp16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match=r"weight is a trainable fp16 weight"):
        accelerator.prepare(nn.Linear(2, 2).half())


def test_fp16_on_the_cpu_needs_its_scaler() -> None:
    with pytest.raises(ConfigurationError, match="small gradients would underflow"):
        Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])


def test_a_closure_cannot_be_scaled() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("bf61", ConfigurationError, "Did you mean 'bf16'"),
        ("fp16-true", UnsupportedError, "Known: no, fp16, bf16"),
    ],
)
def test_unknown_precisions_are_refused(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Accelerator(cpu=True, mixed_precision=name)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_a_loop_without_an_accelerator_has_its_autocast(precision: str, dtype: torch.dtype) -> None:
    from trainer_lib.utils import AutocastKwargs, get_mixed_precision_context_manager

    AcceleratorState(precision, cpu=True)
    layer, batch = torch.nn.Linear(2, 1), torch.ones(1, 2)
    with get_mixed_precision_context_manager(native_amp=True):
        assert layer(batch).dtype is dtype
    with get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)):
        assert layer(batch).dtype is torch.float32
    with get_mixed_precision_context_manager():
        assert layer(batch).dtype is torch.float32


def test_a_scaler_for_a_loop_without_an_accelerator() -> None:
    from trainer_lib.utils import get_fsdp2_grad_scaler, get_grad_scaler

    PartialState(cpu=True)
    for make in (get_grad_scaler, get_fsdp2_grad_scaler):
        scaler = make(init_scale=8.0)
        assert scaler.scale(torch.tensor(2.0)).item() == 16


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_options_of_the_loss_scaler_are_ignored_without_one(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    assert accelerator.scaler is None
    assert [record.message for record in caplog.records] == [
        f"GradScalerKwargs are ignored: only 'fp16' scales the loss (mixed_precision is {precision!r})."
    ]


def test_a_mode_of_torch_functions_sees_the_backward() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            backwards.append(func is torch.Tensor.backward)
            return func(*args, **(kwargs or {}))

    backwards: list[bool] = []
    accelerator, weight = Accelerator(cpu=True), nn.Parameter(torch.ones(()))
    loss = 3 * weight
    with Seen():
        accelerator.backward(loss)
    assert backwards.count(True) == 1
    assert weight.grad is not None
    assert weight.grad.item() == 3
