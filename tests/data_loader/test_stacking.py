"""Samples of plain tensors and integers are stacked at once, into what torch makes of them."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.data_loader.reference import assert_batches_equal
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.readers import row_batches
from trainer_lib.data_loader.readers.row_batches import stack_samples


class Pair(NamedTuple):
    x: Tensor
    y: int


class Streamed(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 3.0).view(count, 3)


def nested(row: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([row, row[:1]])


PLAIN = [
    [*rows()],
    [(row, number) for number, row in enumerate(rows())],
    [(row.to(torch.bfloat16), row > 4) for row in rows()],
    [{"x": row, "y": number} for number, row in enumerate(rows())],
    [(row if number % 2 else row.double(), number) for number, row in enumerate(rows())],
    [(1, row) if number else (2, row) for number, row in enumerate(rows().t())],
    [3, 1, 2, 0],
    [(), (), (), ()],
]
OTHER = [
    [(row, 0.5) for row in rows()],
    [(row, True) for row in rows()],
    [(row, "text") for row in rows()],
    [(row, (row, 1)) for row in rows()],
    [[row, 1] for row in rows()],
    [row.numpy() for row in rows()],
    [np.int64(3), np.int64(4), np.int64(5), np.int64(6)],
    [Pair(row, 1) for row in rows()],
    [OrderedDict(x=row) for row in rows()],
    [torch.nn.Parameter(row) for row in rows()],
    [{"x": row, "y": row.sum()} if number % 2 else {"y": row.sum(), "x": row} for number, row in enumerate(rows())],
    [OrderedDict(x=row) if number else {"x": row} for number, row in enumerate(rows())],
    [{"x": row, "extra": 1} if number else {"x": row} for number, row in enumerate(rows())],
]
WRONG = [
    [*rows(3), torch.zeros(4)],
    [(row,) if number else (row, 1) for number, row in enumerate(rows())],
    [(row, 1) if number else (row,) for number, row in enumerate(rows())],
    [{"x": row} if number else {"x": row, "y": 1} for number, row in enumerate(rows())],
    [{"z": row} if number else {"x": row} for number, row in enumerate(rows())],
    [(row, None if number else row) for number, row in enumerate(rows())],
    [(row, None if number else 1) for number, row in enumerate(rows())],
    [row.to_sparse() for row in rows()],
    [nested(row) for row in rows()],
]


@pytest.mark.parametrize("samples", PLAIN)
def test_plain_samples_are_stacked(samples: list[Any]) -> None:
    assert_batches_equal(stack_samples(samples), default_collate(samples))


@pytest.mark.parametrize("samples", [*OTHER, *WRONG])
def test_other_samples_are_left_to_torch(samples: list[Any]) -> None:
    assert stack_samples(samples) is None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [list, Streamed])
def test_a_loader_gives_torchs_batches(kind: Any, workers: int) -> None:
    for samples in (PLAIN[3], OTHER[3]) if workers else (*PLAIN, *OTHER[:8], *OTHER[10:]):
        loader = DataLoader(kind(samples), batch_size=3, num_workers=workers)
        ours = [*prepare_data_loader(DataLoader(kind(samples), batch_size=3, num_workers=workers), num_processes=1)]
        for actual, expected in zip(ours, loader, strict=True):
            assert_batches_equal(actual, expected)


@pytest.mark.parametrize("samples", WRONG)
def test_a_loader_raises_torchs_error(samples: Any) -> None:
    with pytest.raises((TypeError, RuntimeError, KeyError)) as expected:
        default_collate(samples)
    loader: Any = prepare_data_loader(DataLoader(samples, batch_size=4), num_processes=1)
    with pytest.raises(expected.type) as error:
        list(loader)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("kind", [list, Streamed])
def test_a_loader_stacks_and_asks_torch_for_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = prepare_data_loader(DataLoader(kind(PLAIN[1]), batch_size=4), num_processes=1)
    monkeypatch.setattr(row_batches, "default_collate", None)
    (batch,) = loader
    assert_batches_equal(batch, default_collate(PLAIN[1]))
    assert loader.collate_fn is default_collate


def test_a_function_of_the_user_for_tensors_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(tensors: list[Tensor], *, collate_fn_map: Any) -> Tensor:
        del collate_fn_map
        return torch.stack(tensors).amax(0)

    monkeypatch.setitem(default_collate_fn_map, Tensor, largest)
    samples: Any = [*rows()]
    loader: Any = prepare_data_loader(DataLoader(samples, batch_size=4), num_processes=1)
    (batch,) = loader
    assert batch.tolist() == [9, 10, 11]
