"""Samplers: orders that are functions of seed and epoch, which the engine can enter anywhere."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from tests.data_loader.reference import Numbers, flat, read, worlds
from trainer_lib.data_loader import SeedableRandomSampler, prepare_data_loader
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
    assert list(sampler.iterate_from(5)) != first[5:]  # that is the third epoch
    sampler.set_epoch(0)
    assert list(sampler.iterate_from(5)) == first[5:]
    assert len(first) == len(sampler)


@pytest.mark.parametrize("kind", sorted(_samplers()))
def test_the_global_order_does_not_depend_on_the_world(kind: str) -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=4, sampler=_samplers()[kind])
    (alone,) = worlds(loader, 1)
    three = worlds(loader, 3, even_batches=False)
    for _ in range(2):
        wanted = flat(read(alone))
        dealt = [read(one) for one in three]
        rounds = [flat(one[number] for one in dealt if number < len(one)) for number in range(len(dealt[0]))]
        assert flat(rounds) == wanted


@pytest.mark.parametrize("kind", sorted(_samplers()))
def test_a_pass_goes_on_in_the_middle_without_drawing_what_is_behind(kind: str, monkeypatch: Any) -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=4, sampler=_samplers()[kind])
    whole = prepare_data_loader(loader, num_processes=1, process_index=0)
    wanted = [read(whole), read(whole)][1]
    begun = prepare_data_loader(loader, num_processes=1, process_index=0)
    read(begun)
    iterator = iter(begun)
    assert [next(iterator).tolist() for _ in range(3)] == wanted[:3]
    resumed = prepare_data_loader(loader, num_processes=1, process_index=0)
    resumed.load_state_dict(begun.state_dict())
    monkeypatch.setattr("trainer_lib.data_loader.order.epoch_order.ReplayedOrder.replay", None)
    assert read(resumed) == wanted[3:]


# -- by length -------------------------------------------------------------------------------------------------------


def test_groups_are_sorted_and_hold_what_shuffling_put_there() -> None:
    order = list(LengthGroupedSampler(LENGTHS, group_size=16, seed=7))
    assert sorted(order) == list(range(SIZE))
    shuffled = list(SeedableRandomSampler(range(SIZE), data_seed=7))
    lengths = [LENGTHS[index] for index in order]
    assert lengths[0] == max(LENGTHS)
    # But for the first of the first group and that of the group that had the longest of all, groups are as shuffled.
    groups = [order[first : first + 16] for first in range(0, SIZE, 16)]
    wanted = [shuffled[first : first + 16] for first in range(0, SIZE, 16)]
    assert sum(len(set(one) - set(other)) for one, other in zip(groups, wanted, strict=True)) in (0, 2)
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


def test_the_size_of_groups() -> None:
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
def test_lengths_are_found(dataset: Any) -> None:
    assert lengths_of(dataset, "length") == [3, 5]


def test_samples_without_a_length_are_told() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no field 'lenght' and no 'input_ids'\. They have: length, .*'length'"
    ):
        lengths_of([{"length": 3, "text": "a"}], "lenght")
    with pytest.raises(ConfigurationError, match="They have: no names"):
        lengths_of([(1, 2)], "length")


def test_measuring_lengths_draws_nothing_from_training() -> None:
    class Random(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.rand(index + 1)}

    before = torch.get_rng_state()
    assert lengths_of(Random(3), "length") == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)


# -- by weight -------------------------------------------------------------------------------------------------------


def test_samples_come_as_often_as_their_weights_say() -> None:
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
    [([1.0, -1.0], "finite numbers"), ([float("nan")], "finite numbers"), ([[1.0]], "finite"), ([0.0, 0.0], "all 0")],
)
def test_weights_that_make_no_sense(weights: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WeightedSampler(weights)


# -- the first ones --------------------------------------------------------------------------------------------------


def test_first_samples_of_torchs_samplers_can_still_be_computed() -> None:
    sequential = first_samples(SequentialSampler(range(9)), 4)
    assert (type(sequential), list(sequential)) == (SequentialSampler, [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(3)
    shuffled = first_samples(RandomSampler(range(9), generator=generator), 4)
    assert isinstance(shuffled, SeedableRandomSampler)
    assert list(shuffled) == list(SeedableRandomSampler(range(9), data_seed=3))[:4]
    assert set(flat(list(shuffled) for _ in range(30))) == set(range(9))  # others in each pass
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
