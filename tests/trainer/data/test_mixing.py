"""Mixed datasets: exact proportions, every sample before any repeats, and runs that resume bit for bit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from tests.callbacks.by_hand import Named, assert_close, assert_equal, weights
from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, MixedDataset, PackedDataset


def listed(*sizes: int) -> list[list[tuple[int, int]]]:
    """Return datasets whose samples are (dataset, position)."""
    return [[(dataset, position) for position in range(size)] for dataset, size in enumerate(sizes)]


def epoch(mixed: MixedDataset, number: int) -> list[Any]:
    mixed.set_epoch(number)
    return [mixed[index] for index in range(len(mixed))]


@pytest.mark.parametrize(
    ("sizes", "shares", "length", "counts"),
    [
        ((3, 5), None, None, [3, 5]),
        ((3, 5), [1, 1], None, [4, 4]),
        ((3, 5, 7), [0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ((2, 2, 2), [1, 1, 1], 7, [3, 2, 2]),
        ((100, 1), [99, 1], 50, [50, 0]),
        ((4,), [2], 9, [9]),
    ],
)
def test_an_epoch_reads_each_dataset_in_proportion_to_its_weight(
    sizes: tuple[int, ...], shares: Any, length: int | None, counts: list[int]
) -> None:
    mixed = MixedDataset(listed(*sizes), shares, length=length)
    assert mixed.counts == counts
    for number in range(3):
        read = Counter(dataset for dataset, _ in epoch(mixed, number))
        assert [read[dataset] for dataset in range(len(sizes))] == counts


def test_datasets_are_spread_evenly() -> None:
    mixed = MixedDataset(listed(10, 10), [3, 1], length=400)
    datasets_read = [dataset for dataset, _ in epoch(mixed, 0)]
    assert all(sum(datasets_read[position : position + 4]) == 1 for position in range(0, 400, 4))


def test_every_sample_comes_before_any_repeats() -> None:
    mixed = MixedDataset(listed(4, 10), [1, 1], length=10)
    read = [sample for number in range(8) for sample in epoch(mixed, number)]
    small, large = ([position for dataset, position in read if dataset == number] for number in (0, 1))
    assert all(sorted(small[position : position + 4]) == list(range(4)) for position in range(0, 40, 4))
    assert all(sorted(large[position : position + 10]) == list(range(10)) for position in range(0, 40, 10))
    assert large[:10] != large[10:20]


def test_order_depends_on_the_seed_alone() -> None:
    orders = [epoch(MixedDataset(listed(9, 9), seed=seed), 1) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_arrays_and_datasets_are_mixed() -> None:
    rows, targets = points(8)
    mixed = MixedDataset([(rows, targets), TensorDataset(rows + 100, targets)], [1, 1])
    assert sorted(bool(row.mean() > 50) for row, _ in epoch(mixed, 0)) == [False] * 8 + [True] * 8
    with pytest.raises(IndexError, match="Sample 16 is out of range: there are 16 samples"):
        mixed[16]
    assert torch.equal(mixed[-1][0], mixed[15][0])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixedDataset([]), "datasets must be a list of one or more datasets"),
        (lambda: MixedDataset(listed(2, 2), [1]), r"weights must have one value per dataset \(got 1 for 2 datasets\)"),
        (lambda: MixedDataset(listed(2, 2), [1, 0]), r"weights\[1\] must be a finite number above 0 \(got 0\)"),
        (lambda: MixedDataset(listed(2, 2), [1, float("nan")]), r"weights\[1\] must be"),
        (lambda: MixedDataset([[1], []]), r"datasets\[1\] is empty"),
        (lambda: MixedDataset([[1], Stream()]), r"datasets\[1\] is a Stream, which has no length"),
        (lambda: MixedDataset([[1]], length=0), "length must be"),
    ],
)
def test_invalid_mixtures_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def mixed_run(folder: Path, dies_at: int | None = None, dropout: float = 0.2, **options: Any) -> Named | None:
    rows, targets = points(40)
    data = MixedDataset([(rows[:10], targets[:10]), (rows[10:], targets[10:])], [1, 1], length=24)
    defaults: dict[str, Any] = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "save_every": 2}
    model = network(dropout)
    callbacks = [] if dies_at is None else [Dies(dies_at)]
    mixed_trainer = trainer(
        arguments(output_dir=folder, **{**defaults, **options}), model=model, train_dataset=data, callbacks=callbacks
    )
    try:
        mixed_trainer.fit()
    except InterruptedError:
        return None
    return weights(model)


def whole_and_resumed(folder: Path, dies_at: int, **options: Any) -> tuple[Any, Any]:
    """Return the weights of a whole run, and of a run that was killed in its second epoch and resumed."""
    whole = mixed_run(folder / "whole", **options)
    assert mixed_run(folder / "parts", dies_at, **options) is None
    return whole, mixed_run(folder / "parts", resume="auto", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        pytest.param({"num_workers": 1}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),
    ],
    ids=["shuffled", "in order", "workers", "persistent workers"],
)
def test_a_run_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole, parts = whole_and_resumed(tmp_path, 9, **options)
    assert_equal(parts, whole)
    if options.get(
        "persistent_workers"
    ):  # seeded once, not each epoch, so that dropout draws other numbers than without
        options = {**options, "dropout": 0.0}
        whole = mixed_run(tmp_path / "without dropout", **options) or {}
    if options:
        again = mixed_run(tmp_path / "again", **{**options, "num_workers": 0, "persistent_workers": False})
        assert_equal(whole, again or {})


def test_two_ranks_resume_bit_for_bit_and_train_like_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "sgd", "dropout": 0.0}
    alone = mixed_run(tmp_path / "one", per_device_train_batch_size=8, **options)
    for whole, parts in run_world(lambda: whole_and_resumed(tmp_path, 5, **options)):
        assert_equal(parts, whole)
        assert_close(whole, alone or {})


def test_packed_and_mixed_datasets_are_public() -> None:
    rows: list[list[int]] = [[1, 2, 3], [4, 5], [6]]
    mixed = MixedDataset([PackedDataset(rows, 3), PackedDataset(rows, 3)], [1, 1])
    tokens: Tensor = mixed[0]["input_ids"]
    assert tokens.shape == (3,)
