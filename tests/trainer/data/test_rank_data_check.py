"""Data that differs between ranks: an error that names the ranks, and no false alarms."""

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from tests.callbacks.by_hand import weights
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import DistributedOperationException, Trainer, TrainingArguments
from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.data_loader.readers.fingerprint import alike, fingerprint
from trainer_lib.data_loader.readers.probe import samples_at


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def fit(data: Any, **options: Any) -> str:
    """Return the error of a run, or an empty text."""
    datasets_of_trainer = {"eval_dataset": options.pop("eval_dataset", None)}
    try:
        trainer(arguments(max_steps=2, **options), train_dataset=data, **datasets_of_trainer).fit()
    except DistributedOperationException as error:
        return str(error)
    return ""


def error_of_all(make: Callable[[], Any], processes: int = 2, **options: Any) -> str:
    """Return the error of a run, which is the same on all ranks."""
    errors = run_world(lambda: fit(make(), **options), (), processes, timeout=60)
    assert len(set(errors)) == 1
    return errors[0]


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 6, generator=generator, dtype=dtype), points()[1]


def test_random_arrays_that_differ_between_ranks_are_an_error() -> None:
    error = error_of_all(lambda: drawn(rank()))
    assert error.startswith("Rank 1 reads other data than rank 0. train_dataset[")
    assert "is (float32 of shape (6,) with values" in error
    assert "seed it first: torch.manual_seed(0); else load the same files on all ranks." in error


def test_the_error_names_all_ranks_that_differ() -> None:
    assert error_of_all(lambda: drawn(int(rank() > 1)), 4).startswith("Ranks 2 and 3 read other data than rank 0")


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(zip(drawn(0)[0], points()[1] + rank(), strict=True)),
        lambda: (drawn(0, torch.float64 if rank() else torch.float32)[0].float().mul(1 + rank()), points()[1]),
        lambda: {"inputs": drawn(rank())[0], "labels": points()[1]},
        lambda: Subset(list(zip(*drawn(rank()), strict=True)), range(39)),  # type: ignore[arg-type]
    ],
    ids=["labels", "scale", "columns", "subset"],
)
def test_differences_are_found_in_all_kinds_of_data(make: Callable[[], Any]) -> None:
    assert "Rank 1 reads other data than rank 0" in error_of_all(make)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_samples_with_nan_and_inf_are_alike_unless_they_differ(make: Callable[[Any], Any]) -> None:
    values = [math.nan, math.inf, -math.inf, 1.0]
    same = fingerprint((make(values), math.nan))
    assert alike(same, fingerprint((make(values), math.nan)))
    for index, other in enumerate([1.0, -math.inf, math.nan]):
        changed = [other if index == place else value for place, value in enumerate(values)]
        assert not alike(same, fingerprint((make(changed), math.nan)))
    assert not alike(same, fingerprint((make(values), 1.0)))


def test_evaluation_sets_are_compared_too() -> None:
    def body() -> str:
        return fit(points(), eval_dataset={"easy": points(8), "hard": (drawn(rank())[0][:8], points(8)[1])})

    assert [error.partition(" is (")[0] for error in run_world(body)] == [
        "Rank 1 reads other data than rank 0. eval_dataset['hard'][0]"
    ] * 2


class Augmented(Dataset[Any]):
    """Points with noise from all random generators, and from a generator of the dataset itself."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.file: Any = None
        self.reads = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.file = self.file or object()  # opened at the first read
        noise = torch.rand(1) + random.random() + float(np.random.rand()) + float(self.rng.random())
        return points()[0][index] + 0.1 * noise, points()[1][index]


class Clock(Augmented):
    """Points that depend on a clock."""

    def __getitem__(self, index: int) -> Any:
        return points()[0][index] + time.perf_counter_ns() % 1000, points()[1][index]


class Rounded(Augmented):
    """Points with the rounding differences of another processor."""

    def __getitem__(self, index: int) -> Any:
        return points()[0][index] * (1 + 1e-6 * rank()), points()[1][index]


@pytest.mark.parametrize("make", [Augmented, Clock, Rounded])
def test_random_augmentation_raises_no_error(make: Callable[[], Any]) -> None:
    assert error_of_all(make) == ""


def test_the_check_does_not_change_generators_and_datasets() -> None:
    data = Augmented()
    before = Generators(torch.device("cpu")).state_dict()
    first = samples_at(Subset(data, range(7)), [3, 1])
    second = samples_at(data, [3, 1])
    assert first is not None
    assert second is not None
    assert [row.tolist() for row, _ in first] == [row.tolist() for row, _ in second]
    assert (data.reads, data.file) == (0, None)
    assert data.rng.random() == np.random.default_rng(5).random()
    after = Generators(torch.device("cpu")).state_dict()
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])
    np.testing.assert_equal(before["numpy"], after["numpy"])


def test_a_single_rank_reads_no_samples_for_the_check() -> None:
    class Counted(Dataset[Any]):
        def __init__(self) -> None:
            self.reads: list[int] = []

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.reads.append(index)
            return torch.full((3,), float(index)), torch.tensor([1.0])

    training, evaluation = Counted(), Counted()
    args = TrainingArguments(max_steps=2, per_device_train_batch_size=4, eval_every=2, use_cpu=True, progress_bar=False)
    Trainer(
        nn.Linear(3, 1), args, train_dataset=training, eval_dataset=evaluation, loss_fn=nn.functional.mse_loss
    ).fit()
    assert sorted(training.reads) == evaluation.reads == list(range(8))


def test_a_dataset_that_cannot_be_read_is_not_compared() -> None:
    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 3

    assert samples_at(Named(), [0]) is None


def test_a_dataset_that_closes_its_file_is_not_copied() -> None:
    closed: list[int] = []

    class Closing(Augmented):
        def __del__(self) -> None:
            closed.append(1)

    data = Closing()
    assert samples_at(Subset(data, [0]), [0]) is None
    assert not closed
    assert len(data) == 40


# -- streams -----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Points in order."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*points(), strict=True)


class SplitByHand(Stream):
    """A stream of which each rank takes every second point, as many scripts do."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(zip(*points(), strict=True))[rank() :: 2]


class Declared(SplitByHand):
    """A stream split by hand that declares it."""

    is_split_between_processes = True


class Drawn(Stream):
    """A stream of random points that the library seeds."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            yield torch.randn(6), torch.randint(2, ())


class Simulated(Stream):
    """A stream of random points without a seed."""

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng()
        for _ in range(40):
            yield torch.from_numpy(rng.normal(size=6)).float(), torch.tensor(1)


class Once(Stream):
    """A stream that can be read only once."""

    def __init__(self) -> None:
        self.left = iter(list(zip(*points(), strict=True)))

    def __iter__(self) -> Iterator[Any]:
        return self.left


class SplitOnce(Once):
    """A stream split by hand that can be read only once."""

    def __init__(self) -> None:
        self.left = iter(list(zip(*points(), strict=True))[rank() :: 2])


STREAM: dict[str, Any] = {"lr_scheduler": "constant"}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_streams_split_by_hand_are_an_error(workers: int) -> None:
    error = error_of_all(SplitByHand, num_workers=workers, **STREAM)
    assert error.startswith("Rank 1 reads other data than rank 0. train_dataset[0] is (float32 of shape (6,)")
    assert "set its attribute is_split_between_processes = True" in error


@pytest.mark.parametrize("make", [Stream, Declared, Drawn, Once])
def test_equal_streams_raise_no_error(make: Callable[[], Any]) -> None:
    assert error_of_all(make, **STREAM) == ""


@pytest.mark.slow
@pytest.mark.parametrize("make", [Stream, Drawn])
def test_equal_streams_of_workers_raise_no_error(make: Callable[[], Any]) -> None:
    assert error_of_all(make, num_workers=2, **STREAM) == ""


@pytest.mark.parametrize(("make", "text"), [(Simulated, "train_dataset[0] is"), (SplitOnce, "All ranks must read")])
def test_streams_that_cannot_be_read_alike_again_are_a_warning(make: Callable[[], Any], text: str) -> None:
    def body() -> tuple[str, int]:
        import logging

        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("trainer_lib").addHandler(handler)
        error = fit(make(), **STREAM)
        assert not any("reads other samples of" in record for record in records), "the loader does not say it again"
        return error, sum(f"Rank 1 reads other data than rank 0. {text}" in record for record in records)

    assert run_world(body) == [("", 1), ("", 0)]


def test_the_check_loses_no_samples_of_a_stream_that_is_read_once() -> None:
    def body(make: Callable[[], Any]) -> Any:
        stream_trainer = trainer(arguments(num_train_epochs=1, **STREAM), train_dataset=make())
        stream_trainer.fit()
        return stream_trainer.state.samples, weights(stream_trainer.unwrapped_model)

    for make in (Stream, Once):
        for samples, trained in run_world(body, (make,)):
            assert samples == 40
            assert all(torch.equal(trained[name], value) for name, value in run_world(body, (Stream,))[0][1].items())
