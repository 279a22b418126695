"""The shuffle: each sample once, every order as likely as the others, any place at once."""

import math
from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

from trainer_lib.data_loader import LowMemoryRandomSampler, SeedableRandomSampler
from trainer_lib.data_loader.order.permutation import Draws, Shuffle


def _are_even(counts: list[int]) -> bool:
    """Whether counts are as even as chance makes them: chi-square within 4 standard deviations."""
    expected, freedom = sum(counts) / len(counts), len(counts) - 1
    return sum((count - expected) ** 2 / expected for count in counts) < freedom + 4 * math.sqrt(2 * freedom)


def test_uneven_counts_are_noticed() -> None:
    assert _are_even([101, 99, 105, 94])
    assert not _are_even([101, 99, 155, 94])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000, 4095, 4096, 10_007])
def test_each_sample_comes_once(size: int) -> None:
    for key in range(5):
        assert sorted(Shuffle(size, str(key))(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_as_likely(size: int) -> None:
    passes = 12 * math.factorial(size)
    counts = Counter(tuple(Shuffle(size, str(key))(np.arange(size)).tolist()) for key in range(passes))
    assert _are_even([counts[order] for order in permutations(range(size))])


@pytest.mark.parametrize("size", [64, 5000])
def test_each_place_gets_any_sample(size: int) -> None:
    passes = np.stack([Shuffle(size, str(key))(np.arange(8)) for key in range(2000)])
    for column in passes.T:
        assert _are_even(np.bincount(column * 16 // size, minlength=16).tolist())
    for left, right in zip(passes.T, passes.T[1:], strict=False):
        steps = (right - left) % size  # never 0
        assert _are_even(np.bincount((steps - 1) * 9 // (size - 1), minlength=9).tolist())


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Shuffle(10_000, "a")(np.arange(10_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).sum() < 20


@pytest.mark.parametrize(
    ("size", "begins"), [(100, [99, 24, 66, 79, 96, 16]), (5000, [4294, 253, 4584, 548, 2848, 2549])]
)
def test_an_order_stays_the_same_in_every_release(size: int, begins: list[int]) -> None:
    """A run that is resumed with a later release continues in the order that it began with."""
    assert Shuffle(size, "seed 7, pass 0")(np.arange(6)).tolist() == begins
    assert Draws(5000, "seed 7, pass 0")(np.arange(6)).tolist() == [196, 2300, 2226, 4367, 794, 1298]


def test_passes_differ_and_a_pass_comes_again() -> None:
    sampler = LowMemoryRandomSampler(range(1000), data_seed=3)
    first, second = list(sampler), list(sampler)
    assert sum(left == other for left, other in zip(first, second, strict=True)) < 10
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second
    assert list(LowMemoryRandomSampler(range(1000), data_seed=4)) != first


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (9000, {}),
        (9, {"replacement": True}),
        (9, {"replacement": True, "num_samples": 30}),
        (9, {"num_samples": 4}),
        (9, {"num_samples": 30}),
    ],
)
@pytest.mark.parametrize("kind", [SeedableRandomSampler, LowMemoryRandomSampler])
def test_a_pass_can_be_entered_anywhere(kind: type[SeedableRandomSampler], size: int, options: dict[str, Any]) -> None:
    sampler = kind(range(size), data_seed=3, **options)
    whole = list(sampler)
    assert len(whole) == len(sampler) == options.get("num_samples", size)
    for position in {0, 1, 3, len(whole) - 1, len(whole), 4096, 4097} & set(range(len(whole) + 1)):
        sampler.set_epoch(0)
        assert list(sampler.iterate_from(position)) == whole[position:]


def test_more_samples_than_there_are_come_in_whole_rounds() -> None:
    drawn = list(LowMemoryRandomSampler(range(9), num_samples=30, data_seed=3))
    rounds = [drawn[start : start + 9] for start in range(0, 27, 9)]
    assert all(sorted(samples) == list(range(9)) for samples in rounds)
    assert len(set(map(tuple, rounds))) == 3
    assert len(set(drawn[27:])) == 3


def test_draws_with_replacement_are_even() -> None:
    drawn = LowMemoryRandomSampler(range(10), replacement=True, num_samples=20_000, data_seed=3)
    counts = Counter(drawn)
    assert _are_even([counts[sample] for sample in range(10)])


def test_the_seed_is_the_given_one_else_torchs() -> None:
    generator = torch.Generator().manual_seed(5)
    assert SeedableRandomSampler(range(9), generator=generator, data_seed=3).initial_seed == 3
    torch.manual_seed(8)
    sampler = SeedableRandomSampler(range(9), generator=generator)  # as with Accelerate
    assert sampler.initial_seed == 8
    assert isinstance(sampler, RandomSampler)
    torch.manual_seed(-1)
    assert SeedableRandomSampler(range(9)).initial_seed == 2**64 - 1


def test_any_place_of_a_huge_dataset_is_found_at_once() -> None:
    sampler = LowMemoryRandomSampler(range(10**12), data_seed=3)
    places = np.array([0, 1, 10**12 - 1])
    samples = sampler.lookup(3, 0)(places)
    assert len(set(samples.tolist())) == 3
    assert ((samples >= 0) & (samples < 10**12)).all()
    assert next(sampler.iterate_from(10**12 - 1)) == samples[2]
