"""Samplers: orders that are functions of seed and epoch, so that a run can resume at any position."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from tests.data_loader.reference import Numbers, flat, read, worlds
from trainer_lib.data_loader import LowMemoryRandomSampler, SeedableRandomSampler, prepare_data_loader
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.train_samplers import (
    LengthGroupedSampler,
    LimitedSampler,
    WeightedSampler,
    first_samples,
    lengths_of,
)

SIZE = 100
LENGTHS = np.random.default_rng(0).integers(1, 50, SIZE).tolist()


def _samplers() -> dict[str, Any]:
    return {
        "by length": LengthGroupedSampler(LENGTHS, group_size=16, seed=7),
        "by weight": WeightedSampler(LENGTHS, seed=7),
        "by length, the first": first_samples(LengthGroupedSampler(LENGTHS, group_size=16, seed=7), 37),
        "by weight, the first": first_samples(WeightedSampler(LENGTHS, seed=7), 37),
        "shuffled, the first": first_samples(SeedableRandomSampler(range(SIZE), data_seed=7), 37),
    }


@pytest.mark.parametrize("kind", sorted(_samplers()))
def test_the_order_is_a_function_of_seed_and_epoch(kind: str) -> None:
    sampler, other = _samplers()[kind], _samplers()[kind]
    first, second = list(sampler), list(sampler)
    other.set_epoch(1)
    assert list(other) == second != first
    assert list(sampler.iterate_from(5)) != first[5:]  # this is the third epoch
    sampler.set_epoch(0)
    assert list(sampler.iterate_from(5)) == first[5:]
    assert len(first) == len(sampler)


@pytest.mark.parametrize("kind", sorted(_samplers()))
def test_the_global_order_does_not_depend_on_the_world(kind: str) -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=4, sampler=_samplers()[kind])
    (alone,) = worlds(loader, 1)
    loaders = worlds(loader, 3, even_batches=False)
    for _ in range(2):
        expected = flat(read(alone))
        batches_by_rank = [read(rank_loader) for rank_loader in loaders]
        rounds = [
            flat(batches[number] for batches in batches_by_rank if number < len(batches))
            for number in range(len(batches_by_rank[0]))
        ]
        assert flat(rounds) == expected


@pytest.mark.parametrize("kind", sorted(_samplers()))
def test_an_epoch_resumes_in_the_middle_without_drawing_earlier_samples(kind: str, monkeypatch: Any) -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=4, sampler=_samplers()[kind])
    whole = prepare_data_loader(loader, num_processes=1, process_index=0)
    expected = [read(whole), read(whole)][1]
    interrupted = prepare_data_loader(loader, num_processes=1, process_index=0)
    read(interrupted)
    iterator = iter(interrupted)
    assert [next(iterator).tolist() for _ in range(3)] == expected[:3]
    resumed = prepare_data_loader(loader, num_processes=1, process_index=0)
    resumed.load_state_dict(interrupted.state_dict())
    monkeypatch.setattr("trainer_lib.data_loader.order.epoch_order.ReplayedOrder.replay", None)
    assert read(resumed) == expected[3:]


# -- by length -------------------------------------------------------------------------------------------------------


def test_groups_are_sorted_and_hold_shuffled_samples() -> None:
    order = list(LengthGroupedSampler(LENGTHS, group_size=16, seed=7))
    assert sorted(order) == list(range(SIZE))
    shuffled = list(LowMemoryRandomSampler(range(SIZE), data_seed=7))
    lengths = [LENGTHS[index] for index in order]
    assert lengths[0] == max(LENGTHS)
    # The longest sample of all swaps places with the first; otherwise groups hold the samples of the shuffled order.
    groups = [order[first : first + 16] for first in range(0, SIZE, 16)]
    expected = [shuffled[first : first + 16] for first in range(0, SIZE, 16)]
    assert sum(len(set(group) - set(other)) for group, other in zip(groups, expected, strict=True)) in (0, 2)
    for group in groups:
        inside = [LENGTHS[index] for index in group[1:]]
        assert inside == sorted(inside, reverse=True)


def test_batches_need_less_padding() -> None:
    def padding(order: list[int]) -> int:
        batches = [[LENGTHS[index] for index in order[first : first + 4]] for first in range(0, SIZE, 4)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    grouped = LengthGroupedSampler(LENGTHS, seed=7)
    assert grouped.group_size == 25
    assert padding(list(grouped)) < 0.4 * padding(list(SeedableRandomSampler(range(SIZE), data_seed=7)))


def test_the_default_size_of_groups() -> None:
    assert LengthGroupedSampler([1] * 3).group_size == 1
    assert LengthGroupedSampler([1] * 10_000).group_size == 1024
    assert LengthGroupedSampler([2.0, 1.0]).lengths.tolist() == [2, 1]  # type: ignore[list-item]


@pytest.mark.parametrize("lengths", [[1.5], ["a"], [[1, 2]], [float("nan")]])
def test_lengths_are_whole_numbers(lengths: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole numbers"):
        LengthGroupedSampler(lengths)


@pytest.mark.parametrize(
    "dataset",
    [
        [{"length": 3, "input_ids": [1]}, {"length": 5, "input_ids": [1]}],
        [{"input_ids": [1, 2, 3]}, {"input_ids": torch.ones(5)}],
        datasets.Dataset.from_dict({"length": [3, 5], "input_ids": [[1], [1]]}),
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 3, 4, 5]]}),
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [1, 2, 3, 4, 5]]}).with_format("torch"),
        datasets.Dataset.from_dict({"text": ["abc", "abcde"]}).with_transform(
            lambda batch: {"input_ids": [list(map(ord, text)) for text in batch["text"]]}
        ),
    ],
    ids=["by a field", "by tokens", "by a column", "by a column of tokens", "of tensors", "made on the fly"],
)
def test_lengths_come_from_a_field_or_from_the_tokens(dataset: Any) -> None:
    assert lengths_of(dataset, "length") == [3, 5]


def test_samples_without_a_length_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no field 'lenght' and no 'input_ids'\. Their fields: length, .*'length'"
    ):
        lengths_of([{"length": 3, "text": "a"}], "lenght")
    with pytest.raises(ConfigurationError, match="Their fields: none"):
        lengths_of([(1, 2)], "length")


def test_measuring_lengths_does_not_change_random_generators() -> None:
    class Random(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.rand(index + 1)}

    before = torch.get_rng_state()
    assert lengths_of(Random(3), "length") == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)


# -- by weight -------------------------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0, 0.0]
    count = 200_000
    drawn = np.bincount(list(WeightedSampler(weights, count, seed=3)), minlength=6)
    assert drawn[[0, 3, 5]].tolist() == [0, 0, 0]
    expected = np.array([1, 2, 5]) / 8 * count
    chi_squared = ((drawn[[1, 2, 4]] - expected) ** 2 / expected).sum()
    assert chi_squared < 13.8  # once in a thousand, for a fixed seed


def test_draws_are_fine_enough_for_many_samples() -> None:
    weights = np.ones(3_000_000)
    drawn = np.array(list(WeightedSampler(weights, 30_000, seed=3)))  # type: ignore[arg-type]
    assert len(np.unique(drawn)) > 29_700
    assert abs(drawn.mean() / 1_500_000 - 1) < 0.02


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "finite numbers"),
        ([float("nan")], "finite numbers"),
        ([[1.0]], "finite"),
        ([0.0, 0.0], "must not all be 0"),
    ],
)
def test_invalid_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WeightedSampler(weights)


# -- first samples ---------------------------------------------------------------------------------------------------


def test_first_samples_of_torchs_samplers_can_still_be_computed() -> None:
    sequential = first_samples(SequentialSampler(range(9)), 4)
    assert (type(sequential), list(sequential)) == (SequentialSampler, [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(3)
    shuffled = first_samples(RandomSampler(range(9), generator=generator), 4)
    assert type(shuffled) is RandomSampler  # in its own order
    assert list(shuffled) == torch.randperm(9, generator=torch.Generator().manual_seed(3)).tolist()[:4]
    assert set(flat(list(shuffled) for _ in range(30))) == set(range(9))  # other samples each epoch
    assert len(first_samples(RandomSampler(range(9)), 20)) == 9


def test_first_samples_of_any_other_sampler() -> None:
    class Evens(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter(range(self.epoch, 100, 2))

        def __len__(self) -> int:
            return 50

    limited = first_samples(Evens(), 3)
    assert isinstance(limited, LimitedSampler)
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=2, sampler=limited)
    (prepared,) = worlds(loader, 1)
    assert [read(prepared), read(prepared)] == [[[0, 2], [4]], [[1, 3], [5]]]
    assert len(limited) == 3
    weighted = WeightedRandomSampler([1.0] * 9, 9, generator=torch.Generator())
    (prepared,) = worlds(DataLoader(Numbers(9), batch_size=3, sampler=first_samples(weighted, 3)), 1)
    assert len(flat(read(prepared))) == 3
    assert list(LimitedSampler(BatchSampler(range(9), 2, drop_last=False), 2)) == [[0, 1], [2, 3]]
