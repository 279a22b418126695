"""Data that differs between ranks: an error on all ranks instead of a hang."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import DistributedOperationException, PartialState
from trainer_lib.launchers.process_failures import ProcessFailedError


class UnevenStream(IterableDataset[Any]):
    """A stream of a different length on each rank, which does not declare it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(list(zip(*points(self.count), strict=True)))


def _errors(*runs: tuple[Callable[[int], Any], dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return, for each run, its error on each rank."""

    def train() -> list[str]:
        rank, texts = PartialState(cpu=True).process_index, list[str]()
        for data, options in runs:
            args = arguments(per_device_train_batch_size=4, max_steps=20, **options)
            uneven_trainer = trainer(args, train_dataset=data(rank))
            with pytest.raises(DistributedOperationException) as raised:
                uneven_trainer.fit()
            texts.append(str(raised.value))
            uneven_trainer.accelerator.free_memory()
        return texts

    return list(zip(*run_world(train, (), 2, timeout=60), strict=True))


@pytest.mark.fault("data that end on one of two ranks")
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"gradient_accumulation_steps": 3}, {"num_workers": 1})
        ),
    ],
)
def test_a_stream_that_ends_on_one_rank_ends_the_run_on_all(options: dict[str, Any]) -> None:
    ((ended, more),) = _errors((lambda rank: UnevenStream(24 + 24 * rank), options))
    for text in (ended, more):
        assert "the training data has ended on 1 of 2 ranks and not on the others" in text
        assert "is_split_between_processes = True" in text
    assert "on this rank, 0, it has ended" in ended
    assert "on this rank, 1, it has not" in more


def test_samplers_that_differ_are_an_error_before_the_first_step() -> None:
    def ordered(order: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*points()), batch_size=4, sampler=order)

    lengths, samples = _errors(
        (lambda rank: ordered(range(20 + 4 * rank)), {}), (lambda rank: ordered(range(rank, 40, 2)), {})
    )
    for text in lengths:
        assert "the length of the training data's range: 20 on rank 0, 24 on rank 1" in text
    for text in samples:
        assert "[0, 2, 4, 6] on rank 0, [1, 3, 5, 7] on rank 1" in text


def labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*points(), strict=True))


def without_labels_on_rank_1(samples: list[Any]) -> dict[str, torch.Tensor]:
    inputs, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    return {"input": inputs} if PartialState(cpu=True).process_index else {"input": inputs, "labels": labels}


@pytest.mark.fault("batches without labels on one of two ranks")
def test_a_batch_without_labels_on_one_rank_ends_the_run_on_all() -> None:
    def train() -> None:
        trainer(model=network(), train_dataset=labelled(), collate_fn=without_labels_on_rank_1).fit()

    began = time.monotonic()
    with pytest.raises(ProcessFailedError) as raised:
        run_world(train, (), 2, timeout=60)
    assert time.monotonic() - began < 15
    assert "Process 1 of 2 failed" in str(raised.value)
    assert "The batch has input and no target: none of labels" in str(raised.value)


def test_an_evaluation_without_labels_on_one_rank_fails_on_all() -> None:
    def evaluate() -> str:
        with pytest.raises(DistributedOperationException) as raised:
            trainer(collate_fn=without_labels_on_rank_1).evaluate(labelled())
        return str(raised.value)

    for text in run_world(evaluate, (), 2, timeout=60):
        assert text.startswith("Some batches have no loss, and others have one: 2 on rank 1 have none.")
