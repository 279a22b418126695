"""Blocks whose activations are computed again: the same numbers, names and random draws, and less that is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import ConfigurationError
from trainer_lib.modules.activation_checkpointing import checkpoint_activations


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.dropout(torch.tanh(self.inside(inputs))) * scale


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return inputs


def _gradients(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    model(torch.ones(3, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def _made() -> Any:
    torch.manual_seed(0)
    return _Stack()


def test_what_is_computed_again_is_the_same() -> None:
    plain, checkpointed = _made(), _made()
    checkpoint_activations(checkpointed)
    torch.testing.assert_close(_gradients(checkpointed), _gradients(plain), rtol=0, atol=0)
    assert [block.calls for block in checkpointed.blocks] == [2, 2]
    assert [block.calls for block in plain.blocks] == [1, 1]
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_forward_without_gradients_computes_once() -> None:
    model = _made()
    checkpoint_activations(model, [model.blocks[1]])
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert [block.calls for block in model.blocks] == [1, 1]
    _gradients(model)
    assert [block.calls for block in model.blocks] == [2, 3], "only the block that was named"


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_a_model_that_can_do_it_itself_is_asked(name: str) -> None:
    model = _made()
    asked: list[Any] = []
    model.supports_gradient_checkpointing = True
    setattr(model, name, asked.append)
    checkpoint_activations(model)
    assert asked == [{"use_reentrant": False}]
    _gradients(model)
    assert [block.calls for block in model.blocks] == [1, 1]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finds no repeated blocks in this Linear"):
        checkpoint_activations(nn.Linear(2, 2))
