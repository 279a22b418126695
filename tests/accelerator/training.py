"""A training that tests interrupt and resume; every source of random numbers takes part."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.worlds import forget_world
from trainer_lib import Accelerator, set_seed

SAMPLES = 26


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a dataset's own draws."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = torch.linspace(-1, 1, 8) * (index + 1) / SAMPLES
        if self.noise:
            values = values + random.random() * 0.1 + torch.rand(8) * 0.1 + np.random.random() * 0.1
        return values, torch.tensor([index % 3.0])


class Counting:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def state_dict(self) -> dict[int, float]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[int, float]) -> None:
        self.seen = dict(state)


@dataclass
class Training:
    """A training script, from its start to its end, in this process as if it were a fresh one."""

    precision: str = "no"
    num_workers: int = 0
    accumulation: int = 1
    noise: bool = True
    weighted: bool = False
    clips: bool = False
    seed: int = 0

    def run(self, steps: int, save: dict[int, Path] | None = None, load: Path | None = None) -> dict[str, Any]:
        """Train up to micro-batch `steps`, saving after some, and return the losses and what became of the weights."""
        forget_world()
        # A fresh process stands somewhere else, whatever it was seeded with.
        set_seed(self.seed if load is None else 12345)
        accelerator = Accelerator(
            cpu=True, mixed_precision=self.precision, gradient_accumulation_steps=self.accumulation
        )
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)
        loader = DataLoader(Noisy(self.noise), batch_size=4, shuffle=True, num_workers=self.num_workers)
        counting = Counting()
        accelerator.register_for_checkpointing(counting)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if load is not None:
            accelerator.load_state(load)
        losses: list[float] = []
        done = max(counting.seen, default=0)
        while done < steps:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    noise = float(np.random.random() + random.random())
                    each = (model(inputs) - targets - noise).square().flatten()
                    if self.weighted:
                        accelerator.backward(each.sum(), weight=len(each))
                    else:
                        accelerator.backward(each.mean())
                    if self.clips and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                done += 1
                losses.append(each.mean().item())
                counting.seen[done] = done * 0.5
                if save and done in save:
                    accelerator.save_state(save[done])
                if done == steps:
                    break
        state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        drawn = [random.random(), float(np.random.random()), torch.rand(1).item()]
        return {"losses": losses, "state": state, "lr": schedule.get_last_lr(), "drawn": drawn, "seen": counting.seen}


def assert_bitwise(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """Raise unless the end of a whole run and a resumed one are the same, bit by bit."""
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    for key in ("lr", "drawn", "seen"):
        assert resumed[key] == whole[key], key
    for name, value in whole["state"].items():
        assert torch.equal(value, resumed["state"][name]), name


def names_in(folder: Path) -> Iterator[str]:
    """Yield the names in a folder."""
    return (path.name for path in sorted(folder.iterdir()))
