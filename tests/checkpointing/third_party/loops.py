"""One training loop for both libraries: the same script with `accelerate.Accelerator` and with ours."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator

EPOCH = 5  # batches of an epoch, of each rank


class Seen:
    """A registered object."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"seen": 0, "last": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Loop:
    """Models, optimizers, schedules, a loader and a registered object, prepared by an Accelerator of either library.

    Args:
        accelerator: The accelerator.
        models: How many models, each with an optimizer and a schedule.
        dropout: The probability of dropout.
        shuffle: Whether the data is shuffled.
        ranks: The number of ranks.
    """

    def __init__(
        self, accelerator: Any, models: int = 1, dropout: float = 0.0, shuffle: bool = False, ranks: int = 1
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        bare = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)) for _ in range(models)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05 / (1 + index)) for index, model in enumerate(bare)]
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30) for optimizer in optimizers]
        inputs = torch.randn(8 * EPOCH, 6, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
        loader = DataLoader(data, batch_size=8 // ranks, shuffle=shuffle)
        prepared = accelerator.prepare(*bare, *optimizers, *schedulers, loader)
        self.models, self.optimizers = prepared[:models], prepared[models : 2 * models]
        self.schedulers, self.loader = prepared[2 * models : 3 * models], prepared[-1]
        self.seen = Seen()
        accelerator.register_for_checkpointing(self.seen)

    def train(self, batches: int, skip: int = 0, epoch: int | None = None) -> list[float]:
        """Train on so many batches, the first epoch from the batch `skip`, and return the losses."""
        losses: list[float] = []
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        if epoch is not None:
            loader.set_epoch(epoch)
        while len(losses) < batches:
            for batch, targets in loader:
                losses.append(self.step(batch, targets))
                if len(losses) == batches:
                    break
            loader = self.loader
        return losses

    def step(self, batch: torch.Tensor, targets: torch.Tensor) -> float:
        """Make an update, and return its loss."""
        loss = sum(cross_entropy(model(batch), targets) for model in self.models)
        self.accelerator.backward(loss)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert isinstance(loss, torch.Tensor)
        self.seen.values = {"seen": self.seen.values["seen"] + 1, "last": batch[0, :2]}
        return loss.item()


@contextmanager
def theirs(**options: Any) -> Generator[Any]:
    """Yield an Accelerator of Accelerate, and reset the state that it leaves."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield accelerate.Accelerator(cpu=True, **options)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def ours(**options: Any) -> Accelerator:
    """Return an Accelerator of this library that steps schedules as Accelerate does."""
    return Accelerator(cpu=True, scheduler_steps_per_process=True, **options)
