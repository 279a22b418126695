"""Local SGD: each process trains by itself, and the models are averaged when it is time."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    LocalSGD,
    PreparationError,
    UnsupportedError,
    local_sgd,
)

UPDATES = 7


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(8), toy.model()
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.norm(inputs)) * self.frozen


def _samples(micro_batch: int, process: int) -> slice:
    start = (micro_batch * 3 + process * 7) % 40
    return slice(start, start + 4 + process)


def _state(network: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in network.state_dict().values() if value.is_floating_point()]


def _loss(network: nn.Module, micro_batch: int, process: int, weighted: bool) -> tuple[Tensor, Tensor]:
    """Return a sum of losses and what it weighs."""
    inputs, targets, weights = toy.data()
    samples = _samples(micro_batch, process)
    each = toy.losses(network, inputs[samples], targets[samples])
    weight = weights[samples] if weighted else torch.ones(len(each))
    return (each * weight).sum(), weight.sum()


def _by_hand(processes: int, every: int, steps: int, weighted: bool) -> list[Tensor]:
    """Train as many models as there are processes, and average them."""
    networks = [_Network() for _ in range(processes)]
    optimizers = [torch.optim.AdamW(network.parameters(), lr=1e-2) for network in networks]
    for update in range(UPDATES):
        for process, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            sums = [_loss(network, update * steps + index, process, weighted) for index in range(steps)]
            total = sum(weight for _, weight in sums)
            loss = sum(loss / total for loss, _ in sums) if weighted else sum(loss / w / steps for loss, w in sums)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (update + 1) % every == 0 or update == UPDATES - 1:
            mean = [torch.stack(values).mean(dim=0) for values in zip(*map(_state, networks), strict=True)]
            for network in networks:
                floats = [value for value in network.state_dict().values() if value.is_floating_point()]
                for value, average in zip(floats, mean, strict=True):
                    value.copy_(average)
    return _state(networks[0])


def _train(
    every: int, steps: int, weighted: bool, optimizer_type: Any = torch.optim.AdamW, enabled: bool = True
) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    network = _Network()
    network, optimizer = accelerator.prepare(network, optimizer_type(network.parameters(), lr=1e-2))
    with LocalSGD(accelerator, network, local_sgd_steps=every, enabled=enabled) as averaging:
        for micro_batch in range(UPDATES * steps):
            with accelerator.accumulate(network):
                loss, weight = _loss(network, micro_batch, accelerator.process_index, weighted)
                if weighted:
                    accelerator.backward(loss, weight=weight)
                else:
                    accelerator.backward(loss / weight)
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
    assert averaging.num_steps == UPDATES
    return _state(accelerator.unwrap_model(network))


@pytest.mark.parametrize(
    ("processes", "every", "steps", "weighted"),
    [(2, 3, 1, False), (3, 3, 2, False), (2, 3, 2, True), (2, 1, 1, True), (2, 7, 1, False), (2, 100, 1, False)],
)
def test_training_equals_that_of_several_models_by_hand(processes: int, every: int, steps: int, weighted: bool) -> None:
    expected = _by_hand(processes, every, steps, weighted)
    results = run_world(_train, (every, steps, weighted), processes, timeout=60)
    for ours in results:
        toy.assert_same(ours, expected, rtol=1e-5)
        toy.assert_same(ours, results[0], rtol=0)


@pytest.mark.parametrize("world", ["bare", "of one"])
def test_one_process_trains_as_ever(world: str) -> None:
    expected = _by_hand(1, 1, 2, weighted=False)
    ours = _train(3, 2, False) if world == "bare" else run_world(_train, (3, 2, False), 1, timeout=60)[0]
    toy.assert_same(ours, expected)


def _plain_sgd(local: bool) -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.05))
    with LocalSGD(accelerator, network, 1, enabled=local) as averaging:
        for update in range(UPDATES):
            loss, weight = _loss(network, update, accelerator.process_index, weighted=False)
            accelerator.backward(loss / weight)
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
    return toy.parameters(network)


def test_sgd_averaged_each_update_is_ddp() -> None:
    """Also: what is not enabled trains with DDP."""
    expected = run_world(_plain_sgd, (False,), 2, timeout=60)
    toy.assert_same(expected[0], expected[1], rtol=0)
    for ours in run_world(_plain_sgd, (True,), 2, timeout=60):
        toy.assert_same(ours, expected[0], rtol=2e-6)


def _messages() -> list[int]:
    """Count what is sent in updates of the block, the one that averages last, and of one after it."""
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.05))
    sent: list[int] = []
    all_reduce = dist.ProcessGroup.allreduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        sent[-1] += 1
        return all_reduce(*args, **kwargs)

    dist.ProcessGroup.allreduce = counting  # which dist.all_reduce calls too

    def update() -> None:
        sent.append(0)
        loss, weight = _loss(network, 0, accelerator.process_index, weighted=True)
        accelerator.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()

    with LocalSGD(accelerator, network, 2) as averaging:
        for _ in range(2):
            update()
            averaging.step()
    update()
    return sent


def test_nothing_is_sent_between_averages() -> None:
    """Not even what losses weigh; one message averages all of a small model, and gradients are shared again after."""
    assert run_world(_messages, (), 2, timeout=60) == [[0, 1, 1]] * 2


def _averaged(options: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    network = _Network().to(dtype)
    network = accelerator.prepare(network)
    inside = copy.deepcopy(accelerator.unwrap_model(network))
    with torch.no_grad():
        for value in accelerator.unwrap_model(network).state_dict().values():
            value.add_(accelerator.process_index)
    accelerator.strategy.average_weights(network)
    return _state(inside), _state(accelerator.unwrap_model(network))


@pytest.mark.parametrize("broadcasts", [True, False])
def test_what_is_trained_is_averaged_and_statistics_as_ddp_is_told(broadcasts: bool) -> None:
    results = run_world(_averaged, ({"broadcast_buffers": broadcasts}, torch.float32), 2, timeout=60)
    for process, (before, after) in enumerate(results):
        for name, first, second in zip(_floats(), before, after, strict=True):
            stays = name == "frozen" or ("running" in name and not broadcasts)
            torch.testing.assert_close(second, first + (process if stays else 0.5))


def test_16_bit_weights_are_rounded_once() -> None:
    before, after = run_world(_averaged, ({}, torch.bfloat16), 3, timeout=60)[0]
    trained = [index for index, name in enumerate(_floats()) if name != "frozen"]
    for index in trained:
        rounded = [(before[index] + process).float() for process in range(3)]
        assert torch.equal(after[index], torch.stack(rounded).mean(dim=0).bfloat16())


def _floats() -> list[str]:
    return [name for name, value in _Network().state_dict().items() if value.is_floating_point()]


def _after_an_error() -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    if accelerator.is_main_process:  # of the others none is there to average with
        averaging = LocalSGD(accelerator, network, 2)
        averaging.step()
        with pytest.raises(KeyError), averaging:
            raise KeyError
    return network.require_backward_grad_sync, accelerator.window.is_local


def test_an_error_does_not_wait_for_others() -> None:
    assert run_world(_after_an_error, (), 2, timeout=60) == [(True, False)] * 2


def _static_graph() -> str:
    handlers = [DistributedDataParallelKwargs(static_graph=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    network = accelerator.prepare(toy.model())
    with pytest.raises(UnsupportedError) as error:
        LocalSGD(accelerator, network, 2)
    return str(error.value)


def test_a_static_graph_has_to_be_learnt_together() -> None:
    assert run_world(_static_graph, (), 2, timeout=60)[0].startswith(
        "static_graph=True does not work with LocalSGD: DDP learns the graph"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"local_sgd_steps": 0}, ConfigurationError, "local_sgd_steps must be a whole number of at least 1, got 0."),
        ({"local_sgd_steps": 2.5}, ConfigurationError, "local_sgd_steps must be a whole number"),
        ({"enabled": 1}, ConfigurationError, "enabled must be True or False, got 1."),
        ({"model": nn.Linear(1, 1)}, PreparationError, "LocalSGD got a Linear that is not prepared."),
        ({"accelerator": "gpu"}, ConfigurationError, r"accelerator must be an Accelerator \(got str\)."),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    accelerator = Accelerator(cpu=True)
    good: dict[str, Any] = {
        "accelerator": accelerator,
        "model": accelerator.prepare(nn.Linear(2, 2)),
        "local_sgd_steps": 2,
    }
    with pytest.raises(error, match=words):
        LocalSGD(**{**good, **arguments})


def test_the_name_is_where_users_of_accelerate_look_for_it() -> None:
    assert local_sgd.LocalSGD is LocalSGD
