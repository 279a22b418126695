"""LOMO, which updates in backward: the update is that of SGD, and what cannot work with it is refused."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, MissingPackageError, UnsupportedError

HAS_LOMO = importlib.util.find_spec("lomo_optim") is not None
needs_lomo = pytest.mark.skipif(not HAS_LOMO, reason="lomo-optim is not installed")


def prepared(**arguments: Any) -> tuple[Accelerator, nn.Module, torch.Tensor]:
    from lomo_optim import Lomo  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True, **arguments)
    network = toy.model()
    network, _ = accelerator.prepare(network, Lomo(network, lr=0.1))
    inputs, targets, _ = toy.data()
    return accelerator, network, toy.losses(network, inputs, targets).mean()


def test_another_optimizer_is_not_lomo() -> None:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    assert accelerator.has_lomo_optimizer is False


@needs_lomo
@pytest.mark.parametrize("by_backward", [False, True])
def test_weights_move_in_backward(by_backward: bool) -> None:
    accelerator, network, loss = prepared()
    assert accelerator.has_lomo_optimizer is True
    if by_backward:
        accelerator.backward(loss, learning_rate=0.05)
    else:
        accelerator.lomo_backward(loss, 0.05)
    by_hand = toy.model()
    inputs, targets, _ = toy.data()
    toy.losses(by_hand, inputs, targets).mean().backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.05).step()
    toy.assert_same(toy.parameters(network), toy.parameters(by_hand))
    assert all(parameter.grad is None for parameter in network.parameters())


@needs_lomo
@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"gradient_accumulation_steps": 2}, "gradient accumulation"), ({"mixed_precision": "fp16"}, "scaler of fp16")],
)
def test_what_cannot_work_with_it_is_refused(arguments: dict[str, Any], words: str) -> None:
    accelerator, _, loss = prepared(**arguments)
    with pytest.raises(UnsupportedError, match=words):
        accelerator.lomo_backward(loss, 0.1)


@needs_lomo
def test_several_processes_are_refused() -> None:
    def body() -> str:
        accelerator, _, loss = prepared()
        with pytest.raises(UnsupportedError) as error:
            accelerator.lomo_backward(loss, 0.1)
        return str(error.value)

    assert all("several ranks" in message for message in run_world(body, timeout=60))


@needs_lomo
def test_it_is_for_lomo_alone_and_needs_a_learning_rate() -> None:
    accelerator, network, loss = prepared()
    with pytest.raises(ConfigurationError, match=r"learning_rate must be a number \(got None\)"):
        accelerator.lomo_backward(loss, None)  # type: ignore[arg-type]
    accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="prepared: Lomo, SGD"):
        accelerator.lomo_backward(loss, 0.1)


@pytest.mark.skipif(HAS_LOMO, reason="lomo-optim is installed")
def test_without_the_package_it_says_how_to_get_it() -> None:
    loss = toy.model()(torch.ones(1, 8)).sum()
    with pytest.raises(MissingPackageError, match="pip install lomo-optim"):
        Accelerator(cpu=True).backward(loss, learning_rate=0.1)
