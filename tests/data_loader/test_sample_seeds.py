"""Augmentations that depend on seed, epoch and sample only."""

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.data_loader.reference import worlds
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.order.sample_seeds import _mixed

SIZE = 12


class Augmented(Dataset[Any]):
    """Samples with random numbers of all generators."""

    def __init__(self, names: list[str] | None = None) -> None:
        self.names = names

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> tuple[Any, float, float, float]:
        return index, random.random(), np.random.normal(), torch.rand(()).item()


class OwnGenerators(Augmented):
    """Samples with random numbers of generators that the dataset holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(1), random.Random(1)
        self.old, self.in_torch = np.random.RandomState(1), torch.Generator().manual_seed(1)

    def __getitem__(self, index: Any) -> Any:
        in_torch = torch.rand((), generator=self.in_torch).item()
        return index, self.numpy.random(), self.python.random(), self.old.random(), in_torch


class ByBatch(Augmented):
    """The same, with a way of its own to several samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def _prepared(batch_size: int = 3, num_workers: int = 0, dataset: Any = None, **options: Any) -> Any:
    return worlds(
        DataLoader(
            dataset or Augmented(), batch_size, shuffle=True, num_workers=num_workers,
            collate_fn=list, persistent_workers=num_workers > 0,
        ),
        options.pop("processes", 1), data_seed=5, seed_each_sample=True, **options,
    )  # fmt: skip


def _drawn(*loaders: Any) -> dict[Any, Any]:
    samples = [sample for loader in loaders for batch in loader for sample in batch]
    drawn = {sample[0]: sample[1:] for sample in samples}
    assert all(drawn[sample[0]] == sample[1:] for sample in samples)  # repeats too
    return drawn


def test_a_sample_is_the_same_whoever_loads_it() -> None:
    (alone,) = _prepared()
    first, second = _drawn(alone), _drawn(alone)
    assert len(first) == SIZE
    assert len(set(first.values())) == SIZE
    assert all(first[index] != second[index] for index in range(SIZE))
    for others in (_prepared(4), _prepared(5, processes=2), _prepared(num_workers=2), _prepared(dataset=ByBatch())):
        assert [_drawn(*others), _drawn(*others)] == [first, second]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_so_it_is_after_a_resume(num_workers: int) -> None:
    (whole,) = _prepared()
    _drawn(whole)
    second = _drawn(whole)
    (saving,), (resumed,) = _prepared(num_workers=num_workers), _prepared(num_workers=num_workers)
    saving.set_epoch(1)
    seen = next(iter(saving))
    resumed.load_state_dict(saving.state_dict())
    rest = _drawn(resumed)
    assert rest == {index: second[index] for index in rest}
    assert len(rest) == SIZE - len(seen)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_generators_that_a_dataset_holds_reach_workers(context: str) -> None:
    program = f"""
        from torch.utils.data import DataLoader
        from tests.data_loader.test_sample_seeds import OwnGenerators
        from trainer_lib.data_loader import prepare_data_loader
        loaders = (
            DataLoader(OwnGenerators(), 4, collate_fn=list),
            DataLoader(OwnGenerators(), 4, collate_fn=list, num_workers=1, multiprocessing_context={context!r}),
        )
        here, there = (list(prepare_data_loader(loader, num_processes=1)) for loader in loaders)
        assert len(here) == {SIZE // 4} and here == there
    """
    # In a process of its own: those that tests fork later could not use its fork server.
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=100)


def test_generators_that_a_dataset_holds_are_seeded_too() -> None:
    (alone,) = _prepared(dataset=OwnGenerators())
    first, second = _drawn(alone), _drawn(alone)
    assert len({number for drawn in (*first.values(), *second.values()) for number in drawn}) == 2 * SIZE * 4
    for others in (
        _prepared(5, dataset=OwnGenerators(), processes=2),
        _prepared(dataset=OwnGenerators(), num_workers=2),
    ):
        assert [_drawn(*others), _drawn(*others)] == [first, second]


def test_another_seed_draws_other_numbers() -> None:
    loaders = [
        prepare_data_loader(
            DataLoader(Augmented(), collate_fn=list),
            num_processes=1, process_index=0, data_seed=seed, seed_each_sample=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    first, second = (_drawn(loader) for loader in loaders)
    assert all(first[index] != second[index] for index in range(SIZE))


def test_a_version_of_the_library_draws_what_earlier_ones_drew() -> None:
    splitmix64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the published numbers for seed 0
    assert [_mixed(0, index) for index in (1, np.int64(2), torch.tensor(3))] == splitmix64
    assert _mixed(5, "a") == 12611105603412018386
    assert _mixed(5, (1, 2)) == 5612854291365375168


def test_training_finds_its_generators_as_it_left_them() -> None:
    def drawn(source: Any) -> list[Any]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        return [(random.random(), np.random.random(), torch.rand(1).item()) for _ in source]

    assert drawn(_prepared()[0]) == drawn(range(4))


def test_samples_may_have_names() -> None:
    names = [f"sample {index}" for index in range(4)]

    def prepared(sampler: list[str], num_workers: int = 0) -> Any:
        loader = DataLoader(Augmented(), 2, sampler=sampler, num_workers=num_workers, collate_fn=list)  # type: ignore[arg-type]
        return prepare_data_loader(
            loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True, seed_each_sample=True
        )

    assert _drawn(prepared(names)) == _drawn(prepared(names[::-1], num_workers=1))


def test_batches_of_a_users_sampler_and_single_samples_are_seeded_too() -> None:
    (alone,) = _prepared()
    first = _drawn(alone)
    order = [[3, 1], [2, 0]]
    loader = DataLoader(Augmented(), batch_sampler=order, collate_fn=list)
    batched = prepare_data_loader(
        loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True, seed_each_sample=True
    )
    assert _drawn(batched) == {index: first[index] for index in range(4)}
    single = DataLoader(Augmented(), batch_size=None)
    single = prepare_data_loader(
        single, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True, seed_each_sample=True
    )
    assert {sample[0]: tuple(sample[1:]) for sample in single} == first


class Unsized:
    """Batches of a sampler that does not know how many it has, such as those filled up to a number of tokens."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 1], [2], [0, 4, 5]])

    def __len__(self) -> int:
        raise TypeError("unknown")


def test_batches_of_an_unknown_number_are_seeded_too() -> None:
    (alone,) = _prepared()
    first = _drawn(alone)
    loader = DataLoader(Augmented(), batch_sampler=Unsized(), collate_fn=list)
    loaders = worlds(loader, 2, data_seed=5, low_memory_shuffle=True, seed_each_sample=True)
    assert _drawn(*loaders) == {index: first[index] for index in range(6)}


def test_the_dataset_is_still_the_users() -> None:
    dataset = Augmented(["a"])
    (loader,) = _prepared(dataset=dataset)
    assert loader.dataset is dataset
