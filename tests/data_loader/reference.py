"""Reference loaders for the tests of data loading: samples that know their index, divided by hand."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainer_lib.data_loader import prepare_data_loader


class Numbers(Dataset[int]):
    """A map-style dataset of 0, 1, 2 …"""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        return index


class Stream(IterableDataset[int]):
    """An iterable dataset of 0, 1, 2 … that its workers share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.size, step):
            self.reads += 1
            yield number


class SizedStream(Stream):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.size


class Handed(NamedTuple):
    """A batch as the user gets it, with what the loader says about it."""

    samples: list[int]
    is_last: bool
    rows: tuple[int, int] | None  # total and real


def worlds(loader: DataLoader[Any], processes: int, **options: Any) -> list[Any]:
    """Return what each of several processes would prepare.

    The order is computed from seed and epoch: processes that cannot communicate draw no other order in common.
    """
    options = {"low_memory_shuffle": True, **options}
    return [
        prepare_data_loader(loader, num_processes=processes, process_index=rank, **options) for rank in range(processes)
    ]


def read(loader: Any) -> list[list[int]]:
    """Return the samples of each batch."""
    return [batch.tolist() for batch in loader]


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the samples of several batches in one list."""
    return list(chain.from_iterable(batches))


def read_all(loader: Any) -> list[Handed]:
    """Return the batches and what the loader says of each while it is in hand."""
    return [handed(batch, loader) for batch in loader]


def handed(batch: Any, loader: Any) -> Handed:
    """Return a batch and what the loader says about it."""
    rows = None if loader.rows is None else (loader.rows.total, loader.rows.real)
    return Handed(batch.tolist(), loader.end_of_dataloader, rows)


def by_hand(
    order: Sequence[int],
    batch_size: int,
    processes: int,
    rank: int,
    *,
    split: bool = False,
    drop_last: bool = False,
    even: bool = True,
    start: int = 0,
) -> list[Handed]:
    """Return what a process is to be handed of `order`, from position `start` on."""
    share = batch_size // processes if split else batch_size
    size = share * processes
    batches: list[Handed] = []
    for first in range(start, len(order), size):
        units = list(order[first : first + size])
        real = len(units)
        if real < size and drop_last:
            break
        if even and processes > 1:
            units += [order[index % len(order)] for index in range(size - real)]
        rows = units[rank * share : (rank + 1) * share]
        if rows:
            own_real = min(max(real - rank * share, 0), len(rows))
            batches.append(Handed(rows, False, None if own_real == share else (len(rows), own_real)))
    if batches:
        batches[-1] = batches[-1]._replace(is_last=True)
    return batches


def assert_batches_equal(actual: Any, expected: Any) -> None:
    """Assert that two batches are the same in types, names and values."""
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert list(actual) == list(expected)
        for name in actual:
            assert_batches_equal(actual[name], expected[name])
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_batches_equal(left, right)
    else:
        assert actual == expected
