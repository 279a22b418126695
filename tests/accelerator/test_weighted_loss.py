"""Losses with a weight: the update is that of the mean over all items, however they are spread."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, GradScalerKwargs


def _update(
    splits: tuple[int, ...],
    tensor_weights: bool = True,
    clip: bool = False,
    precision: str = "no",
    is_mean: bool = False,
) -> tuple[list[Tensor], float]:
    """Spread micro-batches of `splits` samples unevenly over the processes; return one update's gradients."""
    handlers = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else None
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=len(splits), mixed_precision=precision, kwargs_handlers=handlers
    )
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, weights = toy.data()
    start, norm = 0, 0.0
    for size in splits:
        samples = torch.arange(start, start + size)[accelerator.process_index :: accelerator.num_processes]
        start += size
        with accelerator.accumulate(network):
            weight = weights[samples]
            loss = (toy.losses(network, inputs[samples], targets[samples]) * weight).sum()
            items = weight.sum() if tensor_weights else int(weight.sum())
            accelerator.backward(loss / items if is_mean else loss, weight=items, is_mean=is_mean)
            if clip and accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(network.parameters(), 0.05))
            optimizer.step()
    return toy.gradients(network), norm


@pytest.mark.parametrize("tensor_weights", [True, False])
@pytest.mark.parametrize("splits", [(24,), (5, 9, 10), (1, 23), (8, 8, 1)])
def test_one_process_equals_one_big_batch(splits: tuple[int, ...], tensor_weights: bool) -> None:
    ours, _ = _update(splits, tensor_weights)
    toy.assert_same(ours, toy.mean_gradients(list(range(sum(splits))), toy.data()[2]))


@pytest.mark.parametrize("tensor_weights", [True, False])
@pytest.mark.parametrize("splits", [(5, 9, 10), (1, 23), (23, 1)])
def test_means_with_their_weights_equal_one_big_batch(splits: tuple[int, ...], tensor_weights: bool) -> None:
    """A rank without samples has a mean of NaN, 0 / 0, with weight 0."""
    expected = toy.mean_gradients(list(range(24)), toy.data()[2])
    for processes in (1, 2):
        for ours, _ in run_world(_update, (splits, tensor_weights, False, "no", True), processes, timeout=60):
            toy.assert_same(ours, expected)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("splits", [(24,), (5, 9, 10), (1, 23), (23, 1)])
def test_several_processes_equal_one_big_batch(processes: int, splits: tuple[int, ...]) -> None:
    """In the last shape all processes but the first have nothing in the micro-batch that updates."""
    expected = toy.mean_gradients(list(range(24)), toy.data()[2])
    for ours, _ in run_world(_update, (splits,), processes, timeout=60):
        toy.assert_same(ours, expected)


def test_a_mean_over_no_items_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    layer = torch.nn.Linear(3, 4)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    inputs = torch.arange(6.0).reshape(2, 3)
    torch.nn.functional.cross_entropy(layer(inputs), torch.tensor([1, 2])).backward()
    expected = toy.gradients(layer)
    layer.zero_grad()
    for labels, items in (([1, 2], 2), ([3, 3], 0), ([-100, -100], 0)):
        with accelerator.accumulate(layer):
            loss = torch.nn.functional.cross_entropy(layer(inputs), torch.tensor(labels))
            accelerator.backward(loss, weight=items, is_mean=True)
            optimizer.step()
    toy.assert_same(toy.gradients(layer), expected)


def _masked_mean_gradients(masks: tuple[tuple[tuple[float, ...], ...], ...]) -> list[Tensor]:
    """Train on means over the samples that a mask of this rank leaves; return one update's gradients."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(masks))
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    for number, masks_of_ranks in enumerate(masks):
        mask = torch.tensor(masks_of_ranks[accelerator.process_index])
        samples = slice(number * len(mask), (number + 1) * len(mask))
        with accelerator.accumulate(network):
            mean = (toy.losses(network, inputs[samples], targets[samples]) * mask).sum() / mask.sum()
            accelerator.backward(mean, weight=mask.sum(), is_mean=True)
            optimizer.step()
    return toy.gradients(network)


def test_the_gradients_of_a_masked_mean_over_nothing_are_zero() -> None:
    """The derivative of 0 / 0 is NaN."""
    nothing, everything = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    masks = (everything, everything), (everything, nothing), (nothing, nothing)
    weights = torch.tensor([2.0] * 3 + [1.0] * 3)
    for gradients in run_world(_masked_mean_gradients, (masks,), 2, timeout=60):
        toy.assert_same(gradients, toy.mean_gradients(list(range(6)), weights))


def test_a_mean_over_nothing_leaves_no_gradients_of_other_optimizers() -> None:
    accelerator, network, (first, second) = _prepared(optimizers=2)
    inputs, _, _ = toy.data()
    mean = network(inputs).sum() * 0.0 / torch.zeros(())
    accelerator.backward(mean, weight=0, optimizer=first, is_mean=True)
    for optimizer in (first, second):
        (parameter,) = optimizer.param_groups[0]["params"]
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_clipping_sees_the_gradients_of_the_big_batch() -> None:
    expected = toy.mean_gradients(list(range(24)), toy.data()[2])
    norm = float(torch.stack([g.norm() for g in expected]).norm())
    clipped = [g * 0.05 / norm for g in expected]
    for ours, our_norm in run_world(_update, ((5, 9, 10), True, True), 2, timeout=60):
        assert our_norm == pytest.approx(norm, rel=1e-6)
        toy.assert_same(ours, clipped, rtol=1e-5)  # torch's clipping adds 1e-6 to the norm


def test_weights_and_fp16_scaling_combine() -> None:
    expected = toy.mean_gradients(list(range(24)), toy.data()[2])
    for ours, _ in run_world(_update, ((5, 9, 10), True, False, "fp16"), 2, timeout=60):
        toy.assert_same(ours, expected, rtol=5e-3)


def _two_updates() -> list[list[Tensor]]:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, weights = toy.data()
    updates = []
    for first in (0, 12):
        samples = torch.arange(first, first + 12)[accelerator.process_index :: accelerator.num_processes]
        loss = (toy.losses(network, inputs[samples], targets[samples]) * weights[samples]).sum()
        accelerator.backward(loss, weight=weights[samples].sum())
        optimizer.step()
        updates.append(toy.gradients(network))
        optimizer.zero_grad()
    return updates


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_are_forgotten_after_the_update(processes: int) -> None:
    for updates in run_world(_two_updates, (), processes, timeout=60):
        for ours, first in zip(updates, (0, 12), strict=True):
            toy.assert_same(ours, toy.mean_gradients(list(range(first, first + 12)), toy.data()[2]))


def _all_weigh_nothing() -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1.0))
    inputs, targets, _ = toy.data()
    accelerator.backward((toy.losses(network, inputs, targets) * 0).sum(), weight=0)
    optimizer.step()
    return toy.parameters(network)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_that_weighs_nothing_changes_nothing(processes: int) -> None:
    for ours in run_world(_all_weigh_nothing, (), processes, timeout=60):
        toy.assert_same(ours, toy.parameters(toy.model()), rtol=0)


def test_the_loss_is_divided_by_about_its_weight_before_backward() -> None:
    """So that fp16 gradients neither overflow nor vanish: the nominal weight is batch size times steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    inputs, targets, _ = toy.data()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=6)
    network, _optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0), loader)
    for batch_inputs, batch_targets in loader:
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, batch_inputs, batch_targets).sum(), weight=6)
            toy.assert_same(toy.gradients(network), [g / 2 for g in toy.mean_gradients(list(range(6)))])
            break


def _gan() -> tuple[list[Tensor], list[Tensor]]:
    """Two optimizers in turn on the same micro-batches, with different weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    left, other = toy.model(), toy.model()
    left, other, first, second = accelerator.prepare(
        left, other, torch.optim.SGD(left.parameters(), lr=0.0), torch.optim.SGD(other.parameters(), lr=0.0)
    )
    inputs, targets, weights = toy.data()
    for start in (0, 12):
        samples = torch.arange(start, start + 12)[accelerator.process_index :: accelerator.num_processes]
        with accelerator.accumulate(left, other):
            each = toy.losses(left, inputs[samples], targets[samples])
            accelerator.backward(each.sum(), weight=len(samples), optimizer=first)
            first.step()
            each = toy.losses(other, inputs[samples], targets[samples]) * weights[samples]
            accelerator.backward(each.sum(), weight=weights[samples].sum(), optimizer=second)
            second.step()
    return toy.gradients(left), toy.gradients(other)


@pytest.mark.parametrize("processes", [1, 2])
def test_two_optimizers_weigh_their_own_losses(processes: int) -> None:
    for first, second in run_world(_gan, (), processes, timeout=60):
        toy.assert_same(first, toy.mean_gradients(list(range(24))))
        toy.assert_same(second, toy.mean_gradients(list(range(24)), toy.data()[2]))


def _prepared(optimizers: int = 1) -> tuple[Accelerator, torch.nn.Module, list[Any]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    made = [torch.optim.SGD([p], lr=0.1) for p in list(network.parameters())[:optimizers]]
    network, *made = accelerator.prepare(network, *made)
    return accelerator, network, made


def test_several_optimizers_need_to_be_told_apart() -> None:
    accelerator, network, _ = _prepared(optimizers=2)
    with pytest.raises(ConfigurationError, match="2 optimizers are prepared"):
        accelerator.backward(network(torch.ones(1, 8)).sum(), weight=1)


def test_weighted_and_plain_losses_do_not_mix() -> None:
    accelerator, network, _ = _prepared()
    with accelerator.accumulate(network):
        accelerator.backward(network(torch.ones(1, 8)).sum(), weight=1)
    with (
        accelerator.accumulate(network),
        pytest.raises(ConfigurationError, match="without weight= in an update that has weighted"),
    ):
        accelerator.backward(network(torch.ones(1, 8)).sum())


def test_plain_and_weighted_losses_do_not_mix() -> None:
    accelerator, network, _ = _prepared()
    with accelerator.accumulate(network):
        accelerator.backward(network(torch.ones(1, 8)).sum())
    with (
        accelerator.accumulate(network),
        pytest.raises(ConfigurationError, match="with weight= in an update that has losses without"),
    ):
        accelerator.backward(network(torch.ones(1, 8)).sum(), weight=1)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "3", torch.ones(2)])
def test_impossible_weights_are_refused(weight: object) -> None:
    accelerator, network, _ = _prepared()
    with pytest.raises(ConfigurationError, match="weight must be"):
        accelerator.backward(network(torch.ones(1, 8)).sum(), weight=weight)  # type: ignore[arg-type]


def test_a_discarded_update_leaves_nothing_to_the_next() -> None:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    for samples in (slice(0, 20), slice(20, 48)):
        optimizer.zero_grad()
        accelerator.backward(toy.losses(network, inputs[samples], targets[samples]).sum(), weight=len(inputs[samples]))
        accelerator.clip_grad_norm_(network.parameters(), 1e9)
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(20, 48))))


def test_clipping_by_value_sees_the_gradients_of_the_big_batch() -> None:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    accelerator.backward(toy.losses(network, inputs, targets).sum(), weight=48)
    accelerator.clip_grad_value_(network.parameters(), 0.1)
    optimizer.step()
    expected = [g.clamp(-0.1, 0.1) for g in toy.mean_gradients(list(range(48)))]
    toy.assert_same(toy.gradients(network), expected)


def test_what_torchs_backward_takes_is_passed_on() -> None:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    loss = toy.losses(network, inputs, targets).sum()
    accelerator.backward(loss, weight=48, retain_graph=True)
    accelerator.backward(loss, weight=48)  # weighs twice as much, and is the same mean
    optimizer.step()
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(48))))


def _shared_by_two_optimizers() -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    first, second = torch.optim.SGD(network[0].parameters(), lr=0.0), torch.optim.SGD(network[2].parameters(), lr=0.0)
    network, first, second = accelerator.prepare(network, first, second)
    inputs, targets, _ = toy.data()
    samples = torch.arange(48)[accelerator.process_index :: accelerator.num_processes]
    loss = toy.losses(network, inputs[samples], targets[samples]).sum()
    accelerator.backward(loss, weight=len(samples), optimizer=(first, second))
    first.step()
    second.step()
    return toy.gradients(network)


@pytest.mark.parametrize("processes", [1, 2])
def test_two_optimizers_may_share_a_loss(processes: int) -> None:
    for ours in run_world(_shared_by_two_optimizers, (), processes, timeout=60):
        toy.assert_same(ours, toy.mean_gradients(list(range(48))))
