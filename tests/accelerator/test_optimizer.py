"""The prepared optimizer is the wrapped one in all but its patience."""

import copy
import gc
import pickle
import sys
from typing import Any

import pytest
import torch

from tests.accelerator import toy
from trainer_lib import Accelerator
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.utils import FullyShardedDataParallelPlugin


def _prepared(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, kind(network.parameters(), lr=0.1, **options))
    return accelerator, network, optimizer


def test_groups_state_and_defaults_are_shared() -> None:
    _, network, optimizer = _prepared()
    assert issubclass(AcceleratedOptimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    assert optimizer.optimizer.param_groups[0]["lr"] == 7.0
    assert optimizer.defaults is optimizer.optimizer.defaults
    network(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.state is optimizer.optimizer.state
    assert len(optimizer.state) == 4
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2


def test_the_state_of_accumulation_can_be_read_from_it() -> None:
    accelerator, network, optimizer = _prepared(torch.optim.SGD)
    accelerator.gradient_accumulation_steps = 2
    assert optimizer.gradient_state is accelerator.gradient_state
    seen = []
    for _ in range(2):
        with accelerator.accumulate(network):
            seen.append(optimizer.gradient_state.sync_gradients)
    assert seen == [False, True]
    assert not hasattr(torch.optim.SGD(network.parameters()), "gradient_state")


def test_state_goes_out_and_in() -> None:
    _, network, optimizer = _prepared()
    network(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 3.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 3.0


def test_a_closure_reaches_the_optimizer() -> None:
    _, network, optimizer = _prepared(torch.optim.LBFGS)
    inputs, targets, _ = toy.data()
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = toy.losses(network, inputs, targets).mean()
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    assert calls[-1] < calls[0]


def test_gradients_are_dropped_as_asked() -> None:
    _, network, optimizer = _prepared()
    network(torch.ones(1, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert float(network[0].weight.grad.abs().sum()) == 0.0
    optimizer.zero_grad()
    assert network[0].weight.grad is None


def test_an_optimizer_that_drops_gradients_in_its_own_way_is_asked() -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    _, network, optimizer = _prepared(Counting)
    network(torch.ones(1, 8)).sum().backward()
    optimizer.zero_grad()
    assert (optimizer.calls, network[0].weight.grad) == (1, None)
    optimizer.optimizer.zero_grad = lambda: None  # as other libraries put something in its place
    network(torch.ones(1, 8)).sum().backward()
    optimizer.zero_grad()
    assert network[0].weight.grad is not None


def test_modes_of_schedule_free_optimizers_are_passed_on() -> None:
    class Moded(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    _, _, optimizer = _prepared(Moded)
    assert not optimizer.is_training  # what has modes begins in none of them
    optimizer.train()
    assert (optimizer.mode, optimizer.is_training) == ("train", True)
    optimizer.eval()
    assert (optimizer.mode, optimizer.is_training) == ("eval", False)
    optimizer.param_groups[0]["train_mode"] = True  # what the groups say counts
    assert optimizer.is_training
    _, _, plain = _prepared()
    plain.train()  # an optimizer without modes has nothing to switch
    plain.eval()
    assert (plain.has_modes, plain.is_training) == (False, True)


def test_it_can_be_copied_and_pickled() -> None:
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.param_groups[0]["lr"] == 0.5


def test_a_missing_attribute_is_the_wrapped_ones() -> None:
    _, _, optimizer = _prepared()
    with pytest.raises(AttributeError, match="AdamW"):
        _ = optimizer.no_such_thing


@pytest.mark.parametrize(
    ("precision", "steps", "style", "words"),
    [
        ("no", 1, "step", None),
        ("no", 2, "step", "This SGD is not prepared, so it steps after each micro-batch, not after 2 of them."),
        ("no", 2, "step at updates", None),
        (
            "fp16",
            1,
            "step",
            "This SGD is not prepared, so it steps with gradients that are multiplied by the loss scale",
        ),
        ("fp16", 1, "scaler", None),
        ("fp16", 2, "other weights", None),
    ],
)
def test_an_optimizer_that_is_not_prepared_gets_a_warning_where_its_steps_differ(
    caplog: pytest.LogCaptureFixture, precision: str, steps: int, style: str, words: str | None
) -> None:
    hooks = optimizer_hooks()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    network = accelerator.prepare(toy.model())
    weights = [torch.nn.Parameter(torch.ones(2))] if style == "other weights" else list(network.parameters())
    optimizer = torch.optim.SGD(weights, lr=1e-9)
    inputs, targets, _ = toy.data()
    for _ in range(4):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs, targets).mean())
            if style == "scaler":
                accelerator.scaler.step(optimizer)
                accelerator.scaler.update()
            elif accelerator.sync_gradients or style != "step at updates":
                optimizer.step()
            optimizer.zero_grad()
    messages = [record.getMessage() for record in caplog.records]
    accelerator.free_memory()
    optimizer.step()
    assert optimizer_hooks() == hooks
    assert len(messages) == len(caplog.records) == (words is not None), messages
    assert messages[0].startswith(words) if words is not None else True


def optimizer_hooks() -> int:
    """Return how many hooks each step of any optimizer calls."""
    gc.collect()  # engines of other tests end theirs
    return len(vars(sys.modules["torch.optim.optimizer"])["_global_optimizer_pre_hooks"])


@pytest.mark.parametrize("plugin", [None, FullyShardedDataParallelPlugin()])
def test_steps_of_others_call_nothing_once_an_accelerator_is_gone(plugin: Any) -> None:
    hooks = optimizer_hooks()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = toy.model()
    weights = list(model.parameters())
    accelerator.backward(accelerator.prepare(model)(toy.data()[0]).sum())
    assert optimizer_hooks() == hooks + (1 if plugin is None else 2)
    del accelerator, model
    assert optimizer_hooks() == hooks
    assert weights


def test_scripts_read_the_state_and_the_placement_of_a_prepared_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(toy.model().parameters(), lr=0.1)
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
    assert not prepared.device_placement
    assert prepared.accelerator_state.device == accelerator.device
    assert accelerator.state._cpu
    assert accelerator.profile_handler is None
