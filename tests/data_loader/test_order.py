"""A computed order (`low_memory_shuffle=True`): a function of seed and epoch for any sampler and world size."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data_loader.reference import Numbers, flat, read, worlds
from tests.worlds import run_world
from trainer_lib.data_loader import LowMemoryRandomSampler, SeedableRandomSampler, get_sampler, prepare_data_loader

SIZE = 48


class DrawsFromEverywhere(Sampler[int]):
    """A user's sampler that shuffles by the generators of Python, numpy and torch."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        for index in order:
            yield (index + random.randrange(SIZE)) % SIZE

    def __len__(self) -> int:
        return SIZE


class HasGenerators(Sampler[int]):
    """A user's sampler that has generators of its own."""

    def __init__(self) -> None:
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(1)
        self.inner = RandomSampler(range(SIZE), generator=self.generator)

    def __iter__(self) -> Iterator[int]:
        order = list(self.inner)
        self.python.shuffle(order)
        return iter(self.numpy.permutation(order).tolist())

    def __len__(self) -> int:
        return SIZE


class Epochs(Sampler[int]):
    """A user's sampler that wants to be told the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + 7 * self.epoch) % SIZE for index in range(SIZE)])

    def __len__(self) -> int:
        return SIZE


def _loader(kind: str, batch_size: int) -> DataLoader[int]:
    samplers: dict[str, Any] = {
        "shuffle": RandomSampler(range(SIZE)),
        "replacement": RandomSampler(range(SIZE), replacement=True),
        "weighted": WeightedRandomSampler(range(1, SIZE + 1), SIZE),
        "weighted, seeded": WeightedRandomSampler(range(1, SIZE + 1), SIZE, generator=torch.Generator()),
        "subset": SubsetRandomSampler(range(SIZE)),
        "draws from everywhere": DrawsFromEverywhere(),
        "has generators": HasGenerators(),
        "epochs": Epochs(),
    }
    return DataLoader(Numbers(SIZE), batch_size=batch_size, sampler=samplers[kind])


KINDS = ["shuffle", "replacement", "weighted", "weighted, seeded", "subset", "draws from everywhere", "has generators"]


def _orders(kind: str, batch_size: int, processes: int, passes: int = 2, **options: Any) -> list[list[int]]:
    """Return the samples of some passes in global order."""
    loaders = worlds(_loader(kind, batch_size), processes, data_seed=5, **options)
    rounds = [zip(*(read(loader) for loader in loaders), strict=True) for _ in range(passes)]
    return [[sample for batches in rank_rounds for batch in batches for sample in batch] for rank_rounds in rounds]


@pytest.mark.parametrize("kind", [*KINDS, "epochs"])
def test_the_order_does_not_depend_on_the_world(kind: str) -> None:
    alone = _orders(kind, 8, 1)
    assert alone[0] != alone[1]
    for processes in (2, 4):
        torch.manual_seed(processes)  # chance elsewhere does not matter
        random.seed(processes)
        np.random.seed(processes)
        assert _orders(kind, 8 // processes, processes) == alone
    assert _orders(kind, 8, 4, split_batches=True) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_depends_on_seed_and_epoch_only(kind: str) -> None:
    loader = prepare_data_loader(
        _loader(kind, 8), num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True
    )
    passes = [read(loader) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    loader.set_epoch(1)
    assert [read(loader), read(loader)] == passes[1:]
    other = prepare_data_loader(
        _loader(kind, 8), num_processes=1, process_index=0, data_seed=6, low_memory_shuffle=True
    )
    assert read(other) != passes[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_computed_order_leaves_the_generators_of_training_alone(kind: str, num_workers: int) -> None:
    loader = _loader(kind, 8)
    users = torch.Generator().manual_seed(9)
    loader = DataLoader(loader.dataset, 8, sampler=loader.sampler, num_workers=num_workers, generator=users)
    loader = prepare_data_loader(loader, num_processes=1, process_index=0, low_memory_shuffle=True)

    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.random(), torch.rand(1).item(), torch.rand(1, generator=users).item()

    def drawn(reads: bool) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        users.manual_seed(1)
        return [draw() for _ in (loader if reads else range(len(loader)))]

    assert drawn(reads=True) == drawn(reads=False)


def test_a_computed_order_leaves_users_samplers_as_they_are() -> None:
    sampler = HasGenerators()
    before = sampler.python.getstate(), sampler.numpy.bit_generator.state, sampler.generator.get_state()
    loader = DataLoader(Numbers(SIZE), batch_size=8, sampler=sampler)
    read(prepare_data_loader(loader, num_processes=1, process_index=0, low_memory_shuffle=True))
    assert (sampler.python.getstate(), sampler.numpy.bit_generator.state) == before[:2]
    assert torch.equal(sampler.generator.get_state(), before[2])
    assert loader.sampler is sampler


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_sampler_is_asked_once_a_pass(num_workers: int) -> None:
    class Counting(Sampler[int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(self.passes, 10))

    sampler = Counting()
    loader = DataLoader(Numbers(10), batch_size=4, sampler=sampler, num_workers=num_workers)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    assert [read(prepared), read(prepared)] == [[[1, 2, 3, 4], [5, 6, 7, 8], [9]], [[2, 3, 4, 5], [6, 7, 8, 9]]]
    with pytest.raises(TypeError, match="has no length"):
        len(prepared)


class Pairs(Sampler[list[int]]):
    """A user's batch sampler that shuffles its batches, inside of which another sampler draws."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        pairs = [order[start : start + 2] for start in range(0, SIZE, 2)]
        random.shuffle(pairs)
        return iter(pairs)

    def __len__(self) -> int:
        return SIZE // 2


def test_batches_of_a_users_batch_sampler_come_in_one_order_for_all() -> None:
    (alone,) = worlds(DataLoader(Numbers(SIZE), batch_sampler=Pairs()), 1, data_seed=5)
    first, second = worlds(DataLoader(Numbers(SIZE), batch_sampler=Pairs()), 2, data_seed=5)
    for _ in range(2):
        expected = read(alone)
        assert sorted(flat(expected)) == list(range(SIZE))
        assert [batch for pair in zip(read(first), read(second), strict=True) for batch in pair] == expected


def test_low_memory_shuffle_replaces_torchs_shuffle_by_a_function_of_the_seed() -> None:
    generator = torch.Generator().manual_seed(21)
    loader = DataLoader(Numbers(SIZE), batch_size=8, shuffle=True, generator=generator)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, low_memory_shuffle=True)
    sampler = get_sampler(prepared)
    assert isinstance(sampler, LowMemoryRandomSampler)
    assert prepared.state_dict()["seed"] == 21
    assert prepared.sampler is sampler
    assert prepared.get_sampler() is sampler
    assert flat(read(prepared)) == list(LowMemoryRandomSampler(range(SIZE), data_seed=21))
    assert type(loader.sampler) is RandomSampler


def test_a_users_seedable_sampler_keeps_its_seed() -> None:
    sampler = SeedableRandomSampler(range(SIZE), data_seed=33)
    loader = DataLoader(Numbers(SIZE), batch_size=8, sampler=sampler)
    assert flat(read(prepare_data_loader(loader, num_processes=1, process_index=0))) == list(sampler)


def _seeds(data_seed: int | None) -> tuple[int, list[list[int]]]:
    from trainer_lib import PartialState

    torch.manual_seed(100 + PartialState().process_index)
    loader = prepare_data_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True), data_seed=data_seed)
    return loader.state_dict()["seed"], read(loader)


@pytest.mark.parametrize(("data_seed", "expected"), [(None, 100), (7, 7)])
def test_all_processes_take_the_seed_of_the_first(data_seed: int | None, expected: int) -> None:
    results = run_world(_seeds, (data_seed,), 2, timeout=60)
    assert [seed for seed, _ in results] == [expected] * 2
    assert sorted(flat((flat(batches) for _, batches in results))) == list(range(8))


def test_a_plain_batch_sampler_subclass_is_shared_by_samples() -> None:
    class Named(BatchSampler):
        name = "mine"

    loader = DataLoader(Numbers(9), batch_sampler=Named(RandomSampler(range(9)), 2, drop_last=False))
    first, second = worlds(loader, 2, data_seed=5)
    assert first.state_dict()["unit"] == "samples"
    assert first.batch_sampler.name == "mine"
    assert len(read(first)) == len(read(second)) == 3
