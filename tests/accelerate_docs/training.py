"""The training that the scripts of this folder share: its data, its model, and its result in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy

LR = 0.1


def parts(batch_size: int = 6, **options: Any) -> tuple[nn.Module, Any, DataLoader[Any], Any]:
    """Return a model, its optimizer, a loader and a schedule that halves the rate at each update."""
    inputs, targets, _ = toy.data()
    model = toy.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size, **options)
    return model, optimizer, loader, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loss_function(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return (outputs - targets).square().mean()


def plain(batch_size: int = 6, updates: int | None = None) -> tuple[list[Tensor], float]:
    """Return the weights and the learning rate after training in plain PyTorch with batches of this size."""
    model, optimizer, loader, schedule = parts(batch_size)
    for number, (inputs, targets) in enumerate(loader):
        if number == updates:
            break
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return toy.parameters(model), optimizer.param_groups[0]["lr"]


def assert_plain(weights: list[Tensor], rate: float, batch_size: int) -> None:
    """Raise unless weights and learning rate are those of plain PyTorch with batches of this size."""
    expected, expected_rate = plain(batch_size)
    toy.assert_same(weights, expected, rtol=1e-5)
    assert abs(rate - expected_rate) < 1e-9
