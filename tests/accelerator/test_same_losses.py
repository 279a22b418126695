"""A script keeps its losses, bit by bit, when its loop is prepared by an Accelerator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from trainer_lib import Accelerator

DATA = TensorDataset(torch.randn(26, 3, generator=torch.Generator().manual_seed(1)))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "shuffled, generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=_generator()),
    "drop_last": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(range(1, 27), 26)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)),
    "sequential": lambda: DataLoader(DATA, 4),
}


def _losses(kind: str, prepares: bool) -> list[float]:
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, held_out = LOADERS[kind](), DataLoader(DATA, 13, shuffle=True)
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    if prepares:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
        backward = accelerator.backward
    losses: list[float] = []
    for _ in range(3):
        model.train()
        for (rows,) in loader:
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [model(rows).sum().item() for (rows,) in held_out]
    return losses


@pytest.mark.parametrize("kind", LOADERS)
def test_a_prepared_loop_has_the_losses_of_the_plain_one(kind: str) -> None:
    assert _losses(kind, prepares=True) == _losses(kind, prepares=False)
