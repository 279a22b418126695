"""Sequences of verbs beside the plain loop: several optimizers, skipped updates, retries, leftovers."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, GradScalerKwargs
from trainer_lib.optimizer import AcceleratedOptimizer


def _line(weight: float = 1.0) -> nn.Linear:
    line = nn.Linear(1, 1, bias=False)
    nn.init.constant_(line.weight, weight)
    return line


def _sgd(network: nn.Module, lr: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), lr=lr)


def _grad(network: Any) -> float:
    return float(network.weight.grad)


ONE = torch.ones(1, 1)


def test_zeroing_first_drops_what_another_loss_left() -> None:
    """As in a GAN: the generator's loss reaches the discriminator, whose next update must not see it."""
    accelerator = Accelerator(cpu=True)
    discriminator, generator = _line(), _line()
    d, g, first, second = accelerator.prepare(discriminator, generator, _sgd(discriminator), _sgd(generator))
    for _ in range(3):
        with accelerator.accumulate(d, g):
            first.zero_grad()
            accelerator.backward(d(ONE).sum())
            first.step()
            assert _grad(d) == 1.0
            second.zero_grad()
            accelerator.backward(d(g(ONE)).sum())
            second.step()
            assert _grad(g) == 1.0


@pytest.mark.parametrize("order", ["zero first", "zero last"])
def test_two_optimizers_each_keep_their_window(order: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    left, other = _line(), _line()
    left, other, first, second = accelerator.prepare(left, other, _sgd(left), _sgd(other))
    seen: list[tuple[float, float]] = []
    for value in (1.0, 3.0, 5.0, 7.0):
        with accelerator.accumulate(left, other):
            for network, optimizer in ((left, first), (other, second)):
                if order == "zero first":
                    optimizer.zero_grad()
                accelerator.backward(network(ONE * value).sum())
                optimizer.step()
            seen.append((_grad(left), _grad(other)))
            if order == "zero last":
                first.zero_grad()
                second.zero_grad()
    assert [seen[1], seen[3]] == [(2.0, 2.0), (6.0, 6.0)]


def test_a_bad_loss_is_gone_with_the_next_zero_grad() -> None:
    accelerator = Accelerator(cpu=True)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network))
    for value in (float("nan"), 1.0):
        with accelerator.accumulate(network):
            optimizer.zero_grad()
            accelerator.backward(network(ONE * value).sum())
            if value == 1.0:
                optimizer.step()
    assert _grad(network) == 1.0


def test_the_end_of_a_window_does_not_outlast_it() -> None:
    """A short window, and then micro-batches that the script counts itself."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    network = _line()
    loader = DataLoader(TensorDataset(torch.ones(1, 1)))
    network, optimizer, loader = accelerator.prepare(network, _sgd(network), loader)
    for (batch,) in loader:
        with accelerator.accumulate(network):
            accelerator.backward(network(batch).sum())
            optimizer.step()
            optimizer.step()  # the second time there is nothing left to bring to size
            assert _grad(network) == 1.0
            optimizer.zero_grad()
    for _ in range(4):
        accelerator.backward(network(ONE).sum())
    optimizer.step()
    assert _grad(network) == 1.0


def test_a_window_keeps_the_number_of_steps_it_began_with() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network))
    for steps in (2, 3, 3):
        accelerator.gradient_accumulation_steps = steps
        with accelerator.accumulate(network):
            accelerator.backward(network(ONE).sum())
            optimizer.step()
    assert _grad(network) == 1.0


def test_fp16_leaves_accumulation_and_discards_updates() -> None:
    handlers = [GradScalerKwargs(init_scale=256.0)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=handlers)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network))
    for _ in range(2):
        with accelerator.accumulate(network):
            accelerator.backward(network(ONE).sum())
            optimizer.step()
    optimizer.zero_grad()
    for discarded in (True, False, False):
        accelerator.backward(network(ONE).sum() * 2)
        accelerator.clip_grad_norm_(network.parameters(), 1e9)
        if not discarded:
            optimizer.step()
        assert _grad(network) == 1.0
        optimizer.zero_grad()


def test_the_scale_waits_for_the_windows_of_all_models() -> None:
    """One model updates twice while the other's window is open: an overflow must not move the scale in between."""
    handlers = [GradScalerKwargs(init_scale=1024.0)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=handlers)
    fast, slow = _line(), _line()
    fast, slow, first, second = accelerator.prepare(fast, slow, _sgd(fast), _sgd(slow))
    for factor in (float("inf"), 1.0):
        with accelerator.accumulate(slow):
            accelerator.backward(slow(ONE).sum())
            second.step()
        for _ in range(2):
            with accelerator.accumulate(fast):
                accelerator.backward(fast(ONE).sum() * factor)
                first.step()
        first.zero_grad()
    assert _grad(slow) == 1.0


def _nothing_in_the_last_micro_batch() -> str | float:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network))
    try:
        for items in (2, 0):
            with accelerator.accumulate(network):
                if items:
                    accelerator.backward(network(torch.ones(items, 1)).sum(), weight=items)
                optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return _grad(network)


def test_a_last_micro_batch_without_a_loss_is_no_update_by_zero() -> None:
    assert _nothing_in_the_last_micro_batch() == 1.0
    for result in run_world(_nothing_in_the_last_micro_batch, (), 2, timeout=60):
        assert "weight=0" in str(result)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_backward_that_failed_weighs_nothing(processes: int) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise torch.OutOfMemoryError("simulated")

    def run() -> float:
        accelerator = Accelerator(cpu=True)
        network = _line()
        network, optimizer = accelerator.prepare(network, _sgd(network))
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.backward(Failing.apply(network(ONE).sum()), weight=1)  # type: ignore[no-untyped-call]
        accelerator.backward(network(ONE).sum(), weight=1)
        optimizer.step()
        return _grad(network if processes == 1 and not hasattr(network, "module") else network.module)

    assert run_world(run, (), processes, timeout=60) == [1.0] * processes


def test_a_weighted_closure_makes_the_update_of_the_mean() -> None:
    accelerator = Accelerator(cpu=True)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network, lr=1.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = network(torch.ones(8, 1)).sum()
        accelerator.backward(loss, weight=np.int64(8))  # pyright: ignore[reportArgumentType]
        return loss.detach()

    optimizer.step(closure)
    assert float(network.weight.detach()) == 0.0  # from 1, by a gradient of 1


@pytest.mark.parametrize("clips", ["in the closure", "before it"])
def test_gradients_that_are_clipped_for_a_closure_are_divided_once(clips: str) -> None:
    accelerator = Accelerator(cpu=True)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network, lr=1.0))

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = network(torch.ones(8, 1)).sum()
        accelerator.backward(loss, weight=8)
        accelerator.clip_grad_norm_(network.parameters(), 1e9)
        return loss.detach()

    loss = torch.zeros(()) if clips == "in the closure" else compute()
    optimizer.step(compute if clips == "in the closure" else lambda: loss)
    assert float(network.weight.detach()) == 0.0  # from 1, by a gradient of 1


def test_a_scaler_given_by_hand_is_used() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    network = _line()
    optimizer = AcceleratedOptimizer(_sgd(network, lr=1.0), True, scaler)
    scaler.scale(network(ONE).sum()).backward()
    optimizer.step()
    assert optimizer.scaler is scaler
    assert float(network.weight.detach()) == 0.0


def test_a_schedule_prepared_before_its_optimizer_knows_of_skipped_updates() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    network = _line()
    optimizer = _sgd(network, lr=1.0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda moves: 0.5**moves))
    network, optimizer = accelerator.prepare(network, optimizer)
    accelerator.backward(network(ONE).sum() * float("inf"))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


# -- copies, other precisions, compiled models -----------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_prepared_model_runs_its_own_weights(duplicate: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    network = accelerator.prepare(_line())
    twin = duplicate(network)
    nn.init.zeros_(twin.weight)
    assert float(twin(ONE).detach()) == 0.0
    assert float(network(ONE).detach()) == 1.0


def test_another_precision_may_follow() -> None:
    network = toy.model()
    types = []
    for name in ("bf16", "no", "bf16"):
        accelerator = Accelerator(cpu=True, mixed_precision=name)
        prepared = accelerator.prepare(network)
        prepared[0].register_forward_hook(lambda module, inputs, outputs: types.append(outputs.dtype), prepend=True)
        prepared(torch.ones(1, 8))
        prepared[0]._forward_hooks.clear()
        accelerator.free_memory()
    assert types == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert "forward" not in vars(network)


def test_a_compiled_model_is_unwrapped_as_asked() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inside = toy.model()
    network = accelerator.prepare(torch.compile(inside, backend="eager"))
    assert network(torch.ones(1, 8)).dtype is torch.float32
    assert accelerator.unwrap_model(network) is network
    assert accelerator.unwrap_model(network, keep_torch_compile=False) is inside
    accelerator.unwrap_model(network, keep_fp32_wrapper=False)
    assert "forward" not in vars(inside)


def test_scripts_may_ask_for_engines_that_are_not_there() -> None:
    state = Accelerator(cpu=True, dynamo_backend="no").state
    assert state.deepspeed_plugin is None
    assert state.fsdp_plugin is None
    assert state.is_fsdp2 is False


def test_a_copied_optimizer_leaves_the_models_behind() -> None:
    accelerator = Accelerator(cpu=True)
    network = _line()
    network, optimizer = accelerator.prepare(network, _sgd(network, lr=0.5))
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with accelerator.accumulate(network):
        accelerator.backward(network(ONE).sum())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.param_groups[0]["lr"] == 0.5
        assert twin.window is not optimizer.window
