"""Clipping: of what, when, and how much."""

from typing import Any

import pytest
import torch

from tests.accelerator import toy
from trainer_lib import Accelerator, ConfigurationError, GradScalerKwargs


def _prepared(steps: int = 1) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    return accelerator, network, optimizer


def test_clipping_by_norm_is_torchs() -> None:
    accelerator, network, _ = _prepared()
    inputs, targets, _ = toy.data()
    accelerator.backward(toy.losses(network, inputs, targets).mean())
    reference = toy.model()
    toy.losses(reference, inputs, targets).mean().backward()
    ours = accelerator.clip_grad_norm_(network.parameters(), 0.1)
    theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert torch.equal(ours, theirs)
    toy.assert_same(toy.gradients(network), toy.gradients(reference), rtol=0)


def test_the_largest_element_may_be_the_norm() -> None:
    accelerator, network, _ = _prepared()
    inputs, targets, _ = toy.data()
    accelerator.backward(toy.losses(network, inputs, targets).mean())
    largest = max(float(gradient.abs().max()) for gradient in toy.gradients(network))
    for norm_type in (float("inf"), "inf"):  # torch takes both
        assert float(accelerator.clip_grad_norm_(network.parameters(), 1e9, norm_type)) == largest  # pyright: ignore[reportArgumentType]


def test_clipping_by_value_is_torchs() -> None:
    accelerator, network, _ = _prepared()
    inputs, targets, _ = toy.data()
    accelerator.backward(toy.losses(network, inputs, targets).mean())
    accelerator.clip_grad_value_(network.parameters(), 0.01)
    assert max(float(g.abs().max()) for g in toy.gradients(network)) == torch.tensor(0.01)


def test_one_tensor_can_be_clipped() -> None:
    accelerator, network, _ = _prepared()
    accelerator.backward(network(torch.ones(2, 8)).sum())
    accelerator.clip_grad_norm_(network[0].weight, 1e-3)
    assert float(network[0].weight.grad.norm()) < 1.1e-3 < float(network[2].weight.grad.norm())


def test_a_micro_batch_that_does_not_update_is_not_clipped() -> None:
    accelerator, network, optimizer = _prepared(steps=2)
    inputs, targets, _ = toy.data()
    for start in (0, 24):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[start : start + 24], targets[start : start + 24]).mean())
            norm = accelerator.clip_grad_norm_(network.parameters(), 1e-3 if start == 0 else 1e9)
            accelerator.clip_grad_value_(network.parameters(), 1e-6 if start == 0 else 1e9)
            optimizer.step()
    expected = toy.mean_gradients(list(range(48)))
    toy.assert_same(toy.gradients(network), expected)
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in expected]).norm(), rtol=1e-6, atol=0)


def test_clipping_one_model_leaves_the_scale_of_another_alone() -> None:
    scaler = GradScalerKwargs(init_scale=256.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler])
    left, other = toy.model(), toy.model()
    left, other, first, second = accelerator.prepare(
        left, other, torch.optim.SGD(left.parameters(), lr=0.0), torch.optim.SGD(other.parameters(), lr=0.0)
    )
    accelerator.backward(left(torch.ones(1, 8)).sum() + other(torch.ones(1, 8)).sum())
    accelerator.clip_grad_norm_(left.parameters(), 1e9)
    ratio = other[0].weight.grad / left[0].weight.grad
    torch.testing.assert_close(ratio, torch.full_like(ratio, 256.0))
    accelerator.clip_grad_norm_(other.parameters(), 1e9)
    torch.testing.assert_close(other[0].weight.grad, left[0].weight.grad)
    first.step()
    second.step()
    assert not accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_impossible_limits_are_refused(limit: float) -> None:
    accelerator, network, _ = _prepared()
    with pytest.raises(ConfigurationError, match="max_norm must be a number of at least 0"):
        accelerator.clip_grad_norm_(network.parameters(), limit)
    with pytest.raises(ConfigurationError, match="clip_value must be a number of at least 0"):
        accelerator.clip_grad_value_(network.parameters(), limit)


def test_a_model_is_not_its_parameters() -> None:
    accelerator, network, _ = _prepared()
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(ConfigurationError, match=r"got a Sequential\). Give model.parameters\(\)"):
            clip(network, 1.0)


@pytest.mark.parametrize(("loss", "words"), [(1.0, "got a float"), (torch.ones(()), "does not require gradients")])
def test_what_cannot_be_differentiated_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Accelerator(cpu=True).backward(loss)
