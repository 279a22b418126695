"""Activations that wait in host memory: the same gradients, weights stay, each tensor is copied once and in time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import StateError
from trainer_lib.modules.activation_offload import ActivationOffload, HostMemory, PinnedCopies
from trainer_lib.modules.forwards import wrap_forward


class _Copies(HostMemory):
    """Transfers that copy on the CPU, as those of an accelerator do, and record what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.moved: list[Tensor] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        self.moved.append(tensor)
        self.events.append("out")
        return tensor.clone()

    def to_device(self, tensor: Tensor) -> Tensor:
        self.events.append("in")
        return tensor.clone()

    def end_block(self) -> None:
        self.events.append("end")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs: Tensor) -> Tensor:
        normal = self.norm(inputs)
        return inputs + torch.tanh(self.query(normal)) * self.key(normal)


def _model(transfers: _Copies | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(3)])
    if transfers is not None:
        mover = ActivationOffload(transfers, smallest=0)
        for block in model:
            wrap_forward(block, mover.around_forward)
    return model


def _gradients(model: nn.Module, dtype: torch.dtype | None = None) -> list[Any]:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = model(inputs)
    output.float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_the_same_and_weights_stay(dtype: torch.dtype | None) -> None:
    transfers = _Copies()
    model = _model(transfers)
    torch.testing.assert_close(_gradients(model, dtype), _gradients(_model(), dtype), rtol=0, atol=0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert transfers.moved
    assert not [moved for moved in transfers.moved if moved.untyped_storage().data_ptr() in weights]
    # Of matrices only activations, of 4 rows; the 16-bit copies of weights have 8.
    assert {moved.shape[0] for moved in transfers.moved if moved.dim() == 2} == {4}


def test_a_tensor_that_is_saved_several_times_is_copied_once() -> None:
    transfers = _Copies()
    _gradients(_model(transfers))
    # inputs, mean and deviation of the norm; the normalized values (for both products); tanh and its two factors
    assert transfers.events.count("out") == 3 * 6
    assert transfers.events.count("in") == 3 * 6


def test_the_block_before_comes_back_while_a_block_runs_its_backward() -> None:
    transfers, backwards = _Copies(), [0]
    model: Any = _model(transfers)
    model[2].query.weight.register_hook(lambda _: backwards.append(transfers.events.count("in")))
    model[1].query.weight.register_hook(lambda _: backwards.append(transfers.events.count("in")))
    _gradients(model)
    assert backwards == [0, 12, 18], "the last block and the one before; then the first"


def test_memory_of_a_block_is_released_at_its_end() -> None:
    transfers = _Copies()
    model = _model(transfers)
    output = model(torch.ones(4, 8))
    assert transfers.events == [*["out"] * 6, "end"] * 3
    transfers.moved.clear()
    output.sum().backward(retain_graph=True)
    output.sum().backward()  # what was brought back serves again


def test_nothing_moves_without_gradients() -> None:
    transfers = _Copies()
    with torch.no_grad():
        _model(transfers)(torch.ones(4, 8))
    assert transfers.events == []


class _ChangesInPlace(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        output = torch.sigmoid(inputs)
        output += 1
        return output


@pytest.mark.parametrize("transfers", [_Copies(), HostMemory()])
def test_a_saved_tensor_that_changes_in_place_is_an_error(transfers: HostMemory) -> None:
    block = _ChangesInPlace()
    wrap_forward(block, ActivationOffload(transfers, smallest=0).around_forward)
    with pytest.raises(StateError, match=r"shape \[2, 3\] that is needed for the backward was changed in place"):
        block(torch.ones(2, 3, requires_grad=True)).sum().backward()


class _Stream:
    """A stream of the CPU, which has none."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self) -> None: ...

    def wait_event(self, _: Any) -> None: ...


def test_a_tensor_that_changes_while_it_is_copied_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", _Stream)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: tensor.detach().clone())
    block, offload = nn.Sigmoid(), ActivationOffload(PinnedCopies(torch.device("cpu")), smallest=0)
    wrap_forward(block, offload.around_forward)
    output = block(torch.ones(2, 3, requires_grad=True))
    output += 1  # the block has ended, and its copy may not have begun
    with pytest.raises(StateError, match=r"shape \[2, 3\] that is needed for the backward was changed in place"):
        block(torch.ones(2, 3, requires_grad=True))


class _DifferentiatesInside(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        energy = inputs.sin()
        (force,) = torch.autograd.grad(energy.sum(), inputs, create_graph=True)
        return force.tanh() * energy


def test_a_block_may_differentiate_inside_its_forward() -> None:
    gradients: list[Any] = []
    for transfers in (None, _Copies()):
        block, inputs = _DifferentiatesInside(), torch.linspace(0, 1, 6).requires_grad_()
        if transfers is not None:
            wrap_forward(block, ActivationOffload(transfers, smallest=0).around_forward)
        block(inputs).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_small_and_expanded_tensors_stay() -> None:
    transfers = _Copies()
    block = nn.Linear(8, 8)
    wrap_forward(block, ActivationOffload(transfers, smallest=1024).around_forward)
    block(torch.ones(4, 8, requires_grad=True)).sum().backward()
    block(torch.ones(8, requires_grad=True).expand(512, 8)).sum().backward()
    assert transfers.events.count("out") == 0
    block(torch.ones(512, 8, requires_grad=True)).sum().backward()
    assert transfers.events.count("out") == 1
