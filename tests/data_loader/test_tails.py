"""How the samples of a pass are dealt out, for every size of the tail, against sharing done by hand."""

from itertools import product
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from tests.data_loader.reference import Numbers, SizedStream, Stream, by_hand, read_all, worlds
from trainer_lib import ConfigurationError
from trainer_lib.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader


class Backwards(Sampler[int]):
    """A user's own sampler."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self):
        return iter(range(len(self.dataset) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.dataset)


def _loader(kind: str, size: int, batch_size: int, drop_last: bool) -> DataLoader[int]:
    if kind in ("stream", "sized stream"):
        dataset = Stream(size) if kind == "stream" else SizedStream(size)
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last)
    numbers = Numbers(size)
    sampler = Backwards(numbers) if kind == "own sampler" else None
    return DataLoader(numbers, batch_size=batch_size, sampler=sampler, drop_last=drop_last)


@pytest.mark.parametrize("kind", ["map", pytest.param("own sampler", marks=pytest.mark.slow), "sized stream"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_every_size_is_dealt_out_as_by_hand(kind: str, even: bool, drop_last: bool, split: bool) -> None:
    for processes, batch_size in product((1, 2, 4), (4,) if split else (1, 3)):
        for size in range(2 * batch_size * processes + 2):
            loader = _loader(kind, size, batch_size, drop_last)
            order = list(range(size))[:: -1 if kind == "own sampler" else 1]
            for rank, prepared in enumerate(worlds(loader, processes, split_batches=split, even_batches=even)):
                expected = by_hand(
                    order, batch_size, processes, rank, split=split, drop_last=drop_last, even=even
                )  # fmt: skip
                for _ in range(2):  # a pass is like the one before
                    assert read_all(prepared) == expected, (processes, batch_size, size, rank)
                assert len(prepared) == len(expected)


@pytest.mark.parametrize("kind", ["map", "own sampler", "stream"])
def test_the_remainder_counts_the_real_samples_of_the_last_round(kind: str) -> None:
    for size, remainder in {16: 0, 17: 1, 23: 7, 24: 0}.items():
        for prepared in worlds(_loader(kind, size, 4, drop_last=False), 2):
            assert [prepared.remainder for _ in prepared][-1] == remainder
    (dropping, _) = worlds(_loader(kind, 17, 4, drop_last=True), 2)
    assert [dropping.remainder for _ in dropping][-1] == 0


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_shards_made_by_hand_deal_out_alike(even: bool, drop_last: bool, split: bool) -> None:
    for size in range(34):
        batches = BatchSampler(SequentialSampler(range(size)), batch_size=4, drop_last=drop_last)
        for rank in range(4):
            expected = [
                handed.samples
                for handed in by_hand(range(size), 4, 4, rank, split=split, drop_last=drop_last, even=even)
            ]
            shard = BatchSamplerShard(batches, 4, rank, split_batches=split, even_batches=even)
            assert list(shard) == expected
            assert len(shard) == len(expected)
            assert shard.total_length == len(batches)
            if even:
                stream = IterableDatasetShard(SizedStream(size), 4, drop_last, 4, rank, split)
                assert list(stream) == [sample for batch in expected for sample in batch]
                assert len(stream) == len(list(stream))


class Buckets(Sampler[list[int]]):
    """A user's own batch sampler, without a batch size: batches of different lengths."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _buckets(count: int) -> list[list[int]]:
    return [list(range(10 * index, 10 * index + 1 + index % 3)) for index in range(count)]


@pytest.mark.parametrize("even", [True, False])
def test_batches_of_a_users_batch_sampler_stay_whole(even: bool) -> None:
    for count in range(10):
        buckets = _buckets(count)
        loader = DataLoader(Numbers(100), batch_sampler=Buckets(buckets))
        for rank, prepared in enumerate(worlds(loader, 4, even_batches=even)):
            rounds = -(-count // 4) if even or rank < count % 4 else count // 4
            expected = [buckets[(4 * index + rank) % count if count < 4 else (4 * index + rank)
                                if 4 * index + rank < count else 4 * index + rank - count]
                        for index in range(rounds)]  # fmt: skip
            got = read_all(prepared)
            assert [handed.samples for handed in got] == expected
            assert len(prepared) == len(expected)
            real = [handed.rows is None for handed in got]
            assert real == [4 * index + rank < count for index in range(rounds)]
            assert all(handed.rows == (len(handed.samples), 0) for handed in got if handed.rows)


@pytest.mark.parametrize("even", [True, False])
def test_batches_of_a_users_batch_sampler_can_be_split(even: bool) -> None:
    buckets = [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    loader = DataLoader(Numbers(100), batch_sampler=Buckets(buckets))
    first, second = (read_all(rank_loader) for rank_loader in worlds(loader, 2, split_batches=True, even_batches=even))
    assert [handed.samples for handed in first] == [[0, 1], [4], [6, 7]]
    assert [handed.samples for handed in second] == [[2, 3], [5], [8, 0] if even else [8]]
    assert [handed.rows for handed in second] == [None, None, (2, 1) if even else (1, 1)]
    assert [handed.rows for handed in first] == [None] * 3
    empty = DataLoader(Numbers(100), batch_sampler=Buckets([]))
    assert [read_all(each) for each in worlds(empty, 2, split_batches=True, even_batches=even)] == [[], []]
    uneven = DataLoader(Numbers(100), batch_sampler=Buckets([[0, 1, 2], [4, 5]]))
    with pytest.raises(ConfigurationError, match="batch 0 of Buckets has 3 samples"):
        read_all(worlds(uneven, 2, split_batches=True)[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_a_part_of_the_last_split_batch_knows_that_the_one_before_is_its_last(workers: int) -> None:
    loader = DataLoader(Numbers(100), batch_sampler=Buckets([[0, 1, 2, 3], [4, 5], [6]]), num_workers=workers)
    first, second = worlds(loader, 2, split_batches=True, even_batches=False)
    got = [
        [(batch.tolist(), rank.end_of_dataloader, rank.others_read_on) for batch in rank] for rank in (first, second)
    ]
    assert got == [
        [([0, 1], False, False), ([4], False, False), ([6], True, False)],
        [([2, 3], False, False), ([5], True, True)],
    ]


def test_batches_that_come_ready_are_shared_as_they_are() -> None:
    import torch

    ready = [torch.tensor([index, index + 100]) for index in range(5)]
    first, second = (read_all(rank_loader) for rank_loader in worlds(DataLoader(ready, batch_size=None), 2))  # type: ignore[arg-type]
    assert [handed.samples[0] for handed in first] == [0, 2, 4]
    assert [handed.samples[0] for handed in second] == [1, 3, 0]
    assert [handed.rows for handed in second] == [None, None, (2, 0)]


def test_a_batch_size_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=5 does not split into 2 equal parts"):
        prepare_data_loader(DataLoader(Numbers(10), batch_size=5), num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ConfigurationError, match="batches that the dataset makes"):
        prepare_data_loader(
            DataLoader(Stream(10), batch_size=None), num_processes=2, process_index=0, split_batches=True
        )
