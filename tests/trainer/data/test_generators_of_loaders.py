"""The order of a `DataLoader` that the user made: the plain loader's in each epoch, and the same after a resume."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from tests.trainer.tasks import arguments
from tests.worlds import run_world
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


class Noisy(Dataset[Any]):
    """Adds noise from generators of its own."""

    def __init__(self) -> None:
        self.numpy, self.python = np.random.default_rng(7), random.Random(7)
        self.torch = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.numpy.random() + self.python.random() + torch.rand((), generator=self.torch).item()
        return torch.tensor([index + noise]), torch.tensor([float(index)])


class NoisyStream(IterableDataset[Any]):
    """The same, without an index."""

    def __init__(self) -> None:
        self.noisy = Noisy()

    def __iter__(self) -> Iterator[Any]:
        return (self.noisy[index] for index in range(ROWS))


def drawn_rows() -> DataLoader[Any]:
    """Return a loader that draws some rows for each evaluation."""
    data = Noisy()
    return DataLoader(data, BATCH, sampler=RandomSampler(data, num_samples=5, generator=data.torch))


@pytest.mark.parametrize("evaluation_set", [Noisy, NoisyStream, drawn_rows, lambda: {"a": Noisy(), "b": NoisyStream()}])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_evaluates_on_the_same_random_numbers(
    evaluation_set: Any, processes: int, tmp_path: Path
) -> None:
    def body() -> tuple[list[Any], list[Any]]:
        def evaluations(folder: str, **options: Any) -> tuple[list[Any], dict[int, str]]:
            torch.manual_seed(0)
            args = arguments(num_train_epochs=3, output_dir=tmp_path / folder, seed=3, keep_last=None, **options)
            rows = torch.arange(float(ROWS)).unsqueeze(1) / ROWS
            data: dict[str, Any] = {"train_dataset": (rows, rows), "eval_dataset": evaluation_set()}
            state = Trainer(nn.Linear(1, 1), args, **data, loss_fn=mse_loss).fit().state
            of_epochs = [
                {name: value for name, value in entry.items() if name.startswith("eval_")} for entry in state.history
            ]
            return [entry for entry in of_epochs if entry], {save["step"]: save["path"] for save in state.checkpoints}

        whole, checkpoints = evaluations("whole")
        return whole, evaluations("resumed", resume=checkpoints[min(checkpoints)])[0]

    for whole, resumed in run_world(body, timeout=60) if processes > 1 else [body()]:
        assert len(whole) == 3
        assert resumed == whole


def test_evaluations_do_not_change_the_random_numbers_of_training() -> None:
    """Where both read parts of one dataset."""

    def trained(**options: Any) -> list[list[float]]:
        data, seen = Noisy(), Seen(None)
        parts: dict[str, Any] = {"train_dataset": Subset(data, range(8)), "eval_dataset": Subset(data, range(8, ROWS))}
        Trainer(nn.Linear(1, 1), arguments(**options), **parts, loss_fn=mse_loss, callbacks=[seen]).fit()
        return seen.steps

    assert trained(eval_every="1 step") == trained(eval_every="never")
