"""`state.samples` is the number of samples that all ranks trained on, the same on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from tests.trainer.fit.test_exact_updates import arguments, classifier, samples
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.events import Callback, Run

UNEVEN = [list(range(7)), [7], [8, 9, 10], list(range(11, 16)), [16, 17], list(range(18, 23))]  # 23 samples


class Counts(Callback):
    """Records the samples after each update and at each evaluation."""

    def __init__(self) -> None:
        self.after: list[int] = []
        self.evaluated: list[int] = []

    def on_step_end(self, run: Run) -> None:
        self.after.append(run.state.samples)

    def on_evaluate_end(self, run: Run, metrics: Any) -> None:
        self.evaluated.append(run.state.samples)


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """23 samples, divided between workers."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, by = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(list(zip(*samples(23), strict=True))[first::by])


class ReadyBatches(IterableDataset[list[Tensor]]):
    """Batches of unequal size."""

    def __iter__(self) -> Any:
        inputs, targets = samples(23)
        return iter([[inputs[indices], targets[indices]] for indices in UNEVEN])


class SplitByRank(IterableDataset[tuple[Tensor, Tensor]]):
    """A different number of samples on each rank: 9 and 14."""

    is_split_between_processes = True

    def __init__(self, rank: int) -> None:
        self.samples = list(zip(*samples(9 if rank == 0 else 14), strict=True))

    def __iter__(self) -> Any:
        return iter(self.samples)


def counts(data: Any, **options: Any) -> tuple[list[int], list[int]]:
    recorder = Counts()
    defaults: dict[str, Any] = {"lr_scheduler": "constant", "num_train_epochs": 2, "eval_every": "7 samples"}
    Trainer(
        classifier(), arguments(**{**defaults, **options}), train_dataset=data, eval_dataset=samples(4),
        loss_fn=cross_entropy, callbacks=[recorder],
    ).fit()  # fmt: skip
    return recorder.after, recorder.evaluated


def batches_of_a_sampler() -> Any:
    return DataLoader(TensorDataset(*samples(23)), batch_sampler=UNEVEN)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "make", [batches_of_a_sampler, lambda: DataLoader(ReadyBatches(), batch_size=None)], ids=["sampler", "ready"]
)
def test_batches_of_unequal_size_are_counted(make: Any, accumulation: int) -> None:
    after = {1: [[7, 8, 11, 16, 18, 23], [8, 16, 23]], 2: [[8, 16, 23], [16, 23]]}
    for processes in (1, 2):
        expected = after[processes][accumulation - 1]
        counts_of_ranks = run_world(
            lambda: counts(make(), gradient_accumulation_steps=accumulation), (), processes, timeout=60
        )
        for actual, evaluated in counts_of_ranks:
            assert actual == [*expected, *(23 + count for count in expected)]
            assert evaluated == counts_of_ranks[0][1]
            assert evaluated


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_short_batch_of_each_worker_is_counted(workers: int, processes: int) -> None:
    """Each of two workers ends with a short batch, in the middle of the epoch."""
    for after, _ in run_world(lambda: counts(DataLoader(Numbers(), 4, num_workers=workers)), (), processes, timeout=60):
        assert after[-1] == 46


def test_ranks_of_a_split_dataset_agree_on_the_count() -> None:
    def body() -> tuple[list[int], list[int]]:
        from trainer_lib import PartialState

        return counts(DataLoader(SplitByRank(PartialState().process_index), batch_size=4))

    first, second = run_world(body, (), 2, timeout=60)
    assert first == second
    assert first[0] == [8, 16, 21, 23, 31, 39, 44, 46]


def test_samples_that_a_rewind_skips_are_counted(tmp_path: Any) -> None:
    """Skipped windows send nothing with gradients, and their samples still count."""

    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs) * torch.where((inputs == 100).any(), torch.nan, 1.0)

    def body() -> tuple[int, list[list[int]]]:
        inputs, targets = samples(23)
        inputs[9] = 100
        data = DataLoader(TensorDataset(inputs, targets), batch_sampler=UNEVEN)
        options = arguments(
            on_nonfinite="rewind", save_every="1 step", output_dir=tmp_path, lr_scheduler="constant", log_every=1
        )
        result = Trainer(Spoiled(), options, train_dataset=data, loss_fn=cross_entropy).fit()
        return result.state.samples, result.state.left_out

    assert run_world(body, (), 2, timeout=60) == [(23, [[8, 16]])] * 2
