"""The toy task of the Accelerator's tests: 48 samples, a small model, and the same update by hand."""

import torch
from torch import Tensor, nn

SAMPLES = 48


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and how many items each sample weighs (some weigh nothing)."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = torch.randn(SAMPLES, 3, generator=generator)
    weights = torch.randint(0, 5, (SAMPLES,), generator=generator)
    return inputs, targets, weights


def model(seed: int = 0) -> nn.Sequential:
    """Return the model, always with the same weights."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def losses(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (network(inputs) - targets).square().sum(dim=1)


def gradients(network: nn.Module) -> list[Tensor]:
    """Return copies of the gradients."""
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def parameters(network: nn.Module) -> list[Tensor]:
    """Return copies of the weights."""
    return [p.detach().clone() for p in network.parameters()]


def mean_gradients(samples: list[int], weights: Tensor | None = None) -> list[Tensor]:
    """Return by hand the gradients of the (weighted) mean loss over `samples` as one batch."""
    inputs, targets, _ = data()
    network = model()
    each = losses(network, inputs[samples], targets[samples])
    chosen = torch.ones(len(samples)) if weights is None else weights[samples].float()
    ((each * chosen).sum() / chosen.sum()).backward()
    return gradients(network)


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-6) -> None:
    """Raise unless two lists of tensors agree to `rtol` of their size."""
    assert len(ours) == len(theirs) > 0
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, rtol=rtol, atol=rtol * float(second.abs().max()))
