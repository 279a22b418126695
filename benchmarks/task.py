"""This file is the work that every contestant does: the same data, model, optimizer, schedule and loss."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 64, 64, 10, 32
MAX_NORM = 1.0
IGNORED = -100  # the label of what does not count, as `cross_entropy` knows it


class Parts(NamedTuple):
    """What a training loop is made of."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: DataLoader[tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """So many batches a process, and how they are used.

    The model is small on purpose: arithmetic would hide what an engine adds to it.
    """

    steps: int
    accumulation: int = 1
    shuffle: bool = False
    some_ignored: bool = False  # a quarter of the labels does not count
    world_size: int = 1

    def parts(self) -> Parts:
        """Return a fresh set, always with the same weights."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
        scheduler = LambdaLR(optimizer, lambda step: 1 - step / 1_000_000)
        return Parts(model, optimizer, scheduler, self.loader())

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader that is not shared out yet: it holds the batches of all processes."""
        rows = self.steps * self.world_size * BATCH_SIZE
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        if self.some_ignored:
            labels[torch.rand(rows, generator=generator) < 0.25] = IGNORED
        return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH_SIZE, shuffle=self.shuffle)


def weights_norm(model: nn.Module) -> float:
    """Return one number that tells whether two trainings came to the same weights."""
    return float(torch.stack([parameter.detach().double().norm() for parameter in model.parameters()]).norm())


def labels_sum(batches: list[Tensor]) -> float:
    """Return one number that tells whether two loaders gave the same samples, in whatever order."""
    return float(torch.cat(batches).sum())
