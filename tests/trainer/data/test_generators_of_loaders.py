"""The order of a `DataLoader` that the user made: the plain loader's in each epoch, and the same after a resume."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.tasks import arguments
from trainer_lib import Callback, Run, Trainer

ROWS, BATCH, STEPS = 12, 4, 9


class Seen(Callback):
    """Records the samples of each step, and ends an epoch after a step."""

    def __init__(self, ends_epoch_at: int | None) -> None:
        self.steps: list[list[float]] = []
        self._ends_epoch_at = ends_epoch_at

    def on_step_end(self, run: Run) -> None:
        self.steps.append(run.batch[0][:, 0].tolist())
        run.control.end_epoch = run.state.step == self._ends_epoch_at


def loader_of(has_generator: bool, workers: int) -> DataLoader[Any]:
    rows = torch.arange(float(ROWS)).unsqueeze(1)
    generator = torch.Generator().manual_seed(5) if has_generator else None
    return DataLoader(TensorDataset(rows, rows), BATCH, shuffle=True, generator=generator, num_workers=workers)


def run_with(loader: DataLoader[Any], folder: Path, ends_epoch_at: int | None, **options: Any) -> tuple[Any, Any]:
    seen = Seen(ends_epoch_at)
    args = arguments(max_steps=STEPS, num_train_epochs=None, output_dir=folder, seed=3, keep_last=None, **options)
    result = Trainer(nn.Linear(1, 1), args, train_dataset=loader, loss_fn=mse_loss, callbacks=[seen]).fit()
    return seen.steps, {entry["step"]: entry["path"] for entry in result.state.checkpoints}


def test_each_epoch_has_the_order_of_the_plain_loader(tmp_path: Path) -> None:
    steps, _ = run_with(loader_of(True, 0), tmp_path, None)
    plain = loader_of(True, 0)
    assert steps == [rows[:, 0].tolist() for rows, _ in itertools.chain(plain, plain, plain)]


@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ends_epoch_at", [None, 2])
def test_a_run_resumed_at_any_step_reads_the_same_samples(
    has_generator: bool, workers: int, ends_epoch_at: int | None, tmp_path: Path
) -> None:
    """In the middle of an epoch, after its last batch, and after an epoch that a callback ended."""
    steps, checkpoints = run_with(
        loader_of(has_generator, workers), tmp_path / "whole", ends_epoch_at, save_every="1 step"
    )
    for step in (1, 2, 5) if workers else (1, 2, 3, 5):
        folder = tmp_path / f"from-{step}"
        resumed, _ = run_with(loader_of(has_generator, workers), folder, ends_epoch_at, resume=checkpoints[step])
        assert resumed == steps[step:]
