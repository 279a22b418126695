"""Going on from a saved position: each sample once, in the order of the uninterrupted run."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Sampler, Subset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_loader.reference import (
    Handed,
    Numbers,
    SizedStream,
    Stream,
    by_hand,
    flat,
    handed,
    read,
    read_all,
    worlds,
)
from trainer_lib import StateError
from trainer_lib.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call

SIZE = 21


class Own(Sampler[int]):
    """A user's sampler that draws from torch's generator."""

    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


def _made(kind: str, batch_size: int = 3, num_workers: int = 0, **options: Any) -> DataLoader[int]:
    options |= {"batch_size": batch_size, "num_workers": num_workers}
    if "stream" in kind:
        return (StatefulDataLoader if "stateful" in kind else DataLoader)(Stream(SIZE), **options)
    samplers: dict[str, Any] = {
        "weighted": lambda: WeightedRandomSampler(range(1, SIZE + 1), SIZE),
        "own": Own,
        "draws": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=SIZE),
    }
    if kind in samplers:
        return DataLoader(Numbers(SIZE), sampler=samplers[kind](), **options)
    return (StatefulDataLoader if "stateful" in kind else DataLoader)(
        Numbers(SIZE), shuffle="shuffle" in kind, **options
    )


def _prepared(kind: str, processes: int = 1, batch_size: int = 3, **options: Any) -> list[DataLoaderShard]:
    return worlds(_made(kind, batch_size, **options), processes, data_seed=5)


def _handed(loader: Any, count: int) -> list[Handed]:
    """Return the next batches of a loader, over as many passes as it takes; the last pass is broken off."""
    batches: list[Handed] = []
    while len(batches) < count:
        for batch in loader:
            batches.append(handed(batch, loader))
            if len(batches) == count:
                break
    return batches


def _saved_after(loader: Any, batches: int) -> dict[str, Any]:
    """Read some batches, and return the state as a checkpoint would hold it."""
    reading = iter(loader)
    for _ in range(batches):
        next(reading)
    return json.loads(json.dumps(loader.state_dict()))


KINDS = ["sequential", "shuffle", "draws", "weighted", "own", "stream", "shuffle, stateful", "stream, stateful"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_position_can_be_gone_on_from(kind: str, processes: int) -> None:
    for rank in range(processes):
        whole = _handed(_prepared(kind, processes)[rank], 20)
        for done in range(16):
            saving, resumed = _prepared(kind, processes)[rank], _prepared(kind, processes)[rank]
            assert _handed(saving, done) == whole[:done]
            resumed.load_state_dict(json.loads(json.dumps(saving.state_dict())))
            assert _handed(resumed, 20 - done) == whole[done:]


@pytest.mark.parametrize(
    ("kind", "num_workers", "persistent"),
    [
        pytest.param("shuffle", 2, False, marks=pytest.mark.slow),
        pytest.param("shuffle", 2, True, marks=pytest.mark.slow),
        pytest.param("stream", 1, True, marks=pytest.mark.slow),
        pytest.param("stream", 2, False, marks=pytest.mark.slow),
        pytest.param("shuffle, stateful", 2, False, marks=pytest.mark.slow),
        ("stream, stateful", 2, True),
    ],
)
def test_with_workers_too(kind: str, num_workers: int, persistent: bool) -> None:
    def prepared() -> DataLoaderShard:
        return _prepared(kind, num_workers=num_workers, persistent_workers=persistent)[0]

    whole = _handed(prepared(), 12)
    done, state = 0, {}
    for done in (1, 7, 6):
        saving, resumed = prepared(), prepared()
        assert _handed(saving, done) == whole[:done]
        state = json.loads(json.dumps(saving.state_dict()))
        resumed.load_state_dict(state)
        assert _handed(resumed, 12 - done) == whole[done:]
    # Workers that have lived through other passes go back as well.
    resumed.load_state_dict(state)
    assert _handed(resumed, 12 - done) == whole[done:]


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "draws", "weighted", "own", "stream"])
@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 3)), ((2, 3), (1, 4)), ((2, 2), (4, 2)), ((4, 1), (2, 5))])
def test_another_world_and_batch_size_go_on_where_the_first_was(
    kind: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    order = flat(read(_prepared(kind, 1, SIZE)[0]))
    for done in range(SIZE // (before[0] * before[1]) + 1):
        state = _saved_after(_prepared(kind, *before)[0], done)
        consumed = done * before[0] * before[1]
        for rank, resumed in enumerate(_prepared(kind, *after)):
            resumed.load_state_dict(state)
            if consumed >= SIZE:
                continue
            assert read_all(resumed) == by_hand(order, after[1], after[0], rank, start=consumed)


@pytest.mark.parametrize("kind", [lambda: Numbers(SIZE), lambda: SizedStream(SIZE)])
def test_what_is_left_of_a_pass_is_counted_in_the_batches_of_now(kind: Any) -> None:
    for behind, left in ((0, [3, 3]), (1, [2, 2]), (3, [1, 1]), (6, [3, 3])):
        (saving,) = worlds(DataLoader(kind(), batch_size=4), 1, data_seed=5)
        resumed = worlds(DataLoader(kind(), batch_size=5), 2, data_seed=5)
        for resumed_loader in resumed:
            resumed_loader.load_state_dict(_saved_after(saving, behind))
        assert [resumed_loader.batches_left for resumed_loader in resumed] == left
        assert [len(read(resumed_loader)) for resumed_loader in resumed] == left


class Placed(Stream):
    """A stream that keeps its place itself."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 4, 0), (1, 4, 1)), ((1, 4, 1), (1, 4, 0)), ((1, 4, 1), (2, 4, 1)), ((1, 4, 1), (1, 8, 1))],
)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_bookmark_of_other_workers_or_batches_misleads_nobody(
    kind: Any, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    size = 160

    def prepared(processes: int, batch_size: int, num_workers: int) -> list[Any]:
        return worlds(kind(Placed(size), batch_size=batch_size, num_workers=num_workers), processes, data_seed=5)

    state = _saved_after(prepared(*before)[0], 37)
    for rank, resumed in enumerate(prepared(*after)):
        resumed.load_state_dict(state)
        assert flat(read(resumed)) == [
            sample for sample in range(148, size) if (sample - 148) // after[1] % after[0] == rank
        ] + (list(range(4)) if (after[0], rank) == (2, 1) else [])


@pytest.mark.parametrize(("before", "after"), [(3, 300), (300, 3), (100, 256)])
def test_what_was_drawn_from_a_users_sampler_is_not_lost(before: int, after: int) -> None:
    class Large(Sampler[int]):
        def __iter__(self):
            return iter(torch.randperm(1000).tolist())

    def prepared(batch_size: int) -> Any:
        loader = DataLoader(Numbers(1000), batch_size=batch_size, sampler=Large())
        return prepare_data_loader(loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True)

    order = flat(read(prepared(1000)))
    resumed = prepared(after)
    resumed.load_state_dict(_saved_after(prepared(before), 2))
    assert flat(read(resumed)) == order[2 * before :]


def test_so_do_split_batches() -> None:
    order = flat(read(_prepared("shuffle", 1, SIZE)[0]))
    state = _saved_after(worlds(_made("shuffle", 4), 2, data_seed=5, split_batches=True)[1], 2)
    for rank, resumed in enumerate(worlds(_made("shuffle", 6), 3, data_seed=5, split_batches=True)):
        resumed.load_state_dict(state)
        assert read_all(resumed) == by_hand(order, 6, 3, rank, split=True, start=8)


def test_batches_of_a_users_batch_sampler_are_gone_on_from_by_batches() -> None:
    buckets = [[3 * index, 3 * index + 1] for index in range(7)]
    loader = DataLoader(Numbers(SIZE), batch_sampler=buckets)
    state = _saved_after(worlds(loader, 2)[0], 2)
    assert (state["unit"], state["position"]) == ("batches", 4)
    resumed = worlds(loader, 3)
    for resumed_loader in resumed:
        resumed_loader.load_state_dict(state)
    assert [read(resumed_loader) for resumed_loader in resumed] == [[buckets[4]], [buckets[5]], [buckets[6]]]


def test_a_process_that_ends_early_says_the_same_as_the_others() -> None:
    first, second = worlds(_made("shuffle", 3), 2, data_seed=5, even_batches=False)
    assert (len(first), len(second)) == (4, 3)
    states = [[loader.state_dict() for _ in loader] for loader in (first, second)]
    assert states[0][:3] == states[1]
    assert states[1][-1]["position"] == 18
    assert first.state_dict() == second.state_dict() == {**states[0][0], "epoch": 1, "position": 0}
    second.load_state_dict(states[0][2])
    assert read(second) == []
    other = worlds(_made("shuffle", 3), 2, data_seed=5, even_batches=False)[1]
    other.set_epoch(1)
    assert read(second) == read(other)


def test_the_last_batch_in_hand_means_the_next_pass() -> None:
    (loader,) = _prepared("shuffle")
    reading = iter(loader)
    for _ in range(len(loader)):
        next(reading)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_a_broken_off_pass_stays_the_position_until_the_next_one() -> None:
    (loader,) = _prepared("shuffle")
    for _ in loader:
        break
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 3)
    reading = iter(loader)
    next(reading)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 3)


def test_naming_the_epoch_that_is_resumed_keeps_the_position() -> None:
    (whole,) = _prepared("shuffle")
    passes = [read(whole) for _ in range(3)]
    (saving,) = _prepared("shuffle")
    saving.set_epoch(1)
    state = _saved_after(saving, 2)
    (resumed,) = _prepared("shuffle")
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert read(resumed) == passes[1][2:]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert read(resumed) == passes[2]


@pytest.mark.parametrize("leave", ["break", "end"])
def test_naming_an_epoch_after_a_pass_starts_it_over(leave: str) -> None:
    (loader,) = _prepared("shuffle")
    for _ in loader:
        if leave == "break":
            break
    loader.set_epoch(5)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (5, 0)
    loader.set_epoch(0)
    assert read(loader) == read(_prepared("shuffle")[0])


def test_the_seed_comes_with_the_state() -> None:
    first = prepare_data_loader(
        _made("shuffle"), num_processes=1, process_index=0, data_seed=1, low_memory_shuffle=True
    )
    second = prepare_data_loader(
        _made("shuffle"), num_processes=1, process_index=0, data_seed=2, low_memory_shuffle=True
    )
    second.load_state_dict(first.state_dict())
    assert read(second) == read(first)


def test_only_what_is_left_is_loaded() -> None:
    class Counting(Numbers):
        loaded = 0

        def __getitem__(self, index: int) -> int:
            self.loaded += 1
            return super().__getitem__(index)

    for sampler in (None, Own()):
        dataset = Counting(SIZE)
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
        state = _saved_after(prepared, 5)
        dataset.loaded = 0
        prepared.load_state_dict(state)
        read(prepared)
        assert dataset.loaded == SIZE - 15


# -- skipping by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_prepared_loader_can_be_started_some_batches_in(kind: str, processes: int) -> None:
    for rank in range(processes):
        whole = _prepared(kind, processes)[rank]
        first, second, third = read_all(whole), read_all(whole), read_all(whole)
        for skipped in range(len(first) + 2):
            loader = _prepared(kind, processes)[rank]
            rest = skip_first_batches(loader, skipped)
            if "stream" not in kind:
                assert (len(rest), len(loader)) == (max(0, len(first) - skipped), len(first))
            assert read_all(rest) == first[skipped:]
            # The pass over the rest was one over the data, whichever loader is read next.
            assert read_all(loader) == second
            assert read_all(rest) == third
            if "stream" not in kind:
                assert len(rest) == len(first)


def test_the_state_of_the_loader_tells_of_the_skipped_start() -> None:
    (loader,) = _prepared("shuffle")
    for _ in islice(skip_first_batches(loader, 2), 3):
        pass
    assert loader.state_dict()["position"] == 15


def test_a_loaded_position_is_not_skipped_twice() -> None:
    # As scripts for Accelerate do it: load the state, then skip what was done.
    (whole,) = _prepared("shuffle")
    first = read(whole)
    state = _saved_after(_prepared("shuffle")[0], 3)
    (loader,) = _prepared("shuffle")
    loader.load_state_dict(state)
    assert read(skip_first_batches(loader, 3)) == first[3:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_plain_loaders_can_be_started_some_batches_in(num_workers: int) -> None:
    loader = DataLoader(Numbers(10), batch_size=4, num_workers=num_workers)
    rest = skip_first_batches(loader, 1)
    assert type(rest) is DataLoader
    assert len(rest) == 2
    assert [read(rest), read(rest), read(loader)] == [read(loader)[1:], read(loader), read(loader)]
    assert read(skip_first_batches(loader, 5)) == []
    stream = DataLoader(Stream(10), batch_size=4, num_workers=num_workers)
    rest = skip_first_batches(stream, 1)
    assert [read(rest), read(rest)] == [read(stream)[1:], read(stream)]


# -- states that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (lambda: DataLoader(Numbers(9)), lambda: DataLoader(Numbers(8)), "saved with 9 samples per pass.*has 8"),
        (
            lambda: DataLoader(SizedStream(9)),
            lambda: DataLoader(SizedStream(8)),
            "saved with 9 samples per pass.*has 8",
        ),
        (lambda: DataLoader(Stream(9)), lambda: DataLoader(Numbers(9)), "style 'iterable'.*style 'map'"),
        (
            lambda: DataLoader(Numbers(9)),
            lambda: DataLoader(Numbers(9), batch_sampler=[[0]]),
            "unit 'samples'.*unit 'batches'",
        ),
        (lambda: DataLoader(Stream(9), num_workers=2), lambda: DataLoader(Stream(9)), "num_workers was 2.*is 0"),
        (
            lambda: DataLoader(Stream(9), num_workers=2),
            lambda: DataLoader(Stream(9), num_workers=2, batch_size=2),
            "read 1 samples per round.*2 now",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(saved: Any, loaded: Any, message: str) -> None:
    state = prepare_data_loader(saved(), num_processes=1, process_index=0).state_dict()
    loader = prepare_data_loader(loaded(), num_processes=1, process_index=0)
    with pytest.raises(StateError, match=message):
        loader.load_state_dict(state)


def test_something_else_is_no_state() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(9)), num_processes=1, process_index=0)
    with pytest.raises(StateError, match="epoch, position, seed, style, unit, length, bookmark is missing"):
        loader.load_state_dict({"_num_yielded": 3})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_worker_reads_in_the_same_order_as_none(num_workers: int) -> None:
    (saving,) = _prepared("stream", num_workers=num_workers)
    (resumed,) = _prepared("stream", num_workers=1 - num_workers)
    whole = read(resumed)
    resumed.load_state_dict(_saved_after(saving, 2))
    assert read(resumed) == whole[2:]


# -- random numbers that training and data draw from the same generators ---------------------------------------------


class Noisy(Numbers):
    """A dataset whose samples draw from the generators that training draws from."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.random(), torch.rand(()).item()


def _noisy(rows: list[Any]) -> list[Any]:
    return [(row, random.random(), np.random.random(), torch.rand(()).item()) for row in rows]


@pytest.mark.parametrize("kind", ["dataset", "collate function", "collate function of a stream"])
def test_without_workers_even_random_numbers_go_on_bitwise(kind: str) -> None:
    def prepared() -> Any:
        dataset = Noisy(SIZE) if kind == "dataset" else Stream(SIZE) if "stream" in kind else Numbers(SIZE)
        loader = DataLoader(dataset, batch_size=3, collate_fn=list if kind == "dataset" else _noisy)
        return prepare_data_loader(loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True)

    def training(loader: Any) -> Iterator[Any]:
        while True:
            for batch in loader:
                yield batch, torch.rand(()).item(), random.random(), np.random.random()  # a dropout, say

    for done in (0, 2, 6, 7, 9):
        loader, resumed = prepared(), prepared()
        run = training(loader)
        list(islice(run, done))
        state = loader.state_dict()
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        rest = list(islice(run, 9))
        resumed.load_state_dict(state)
        restores: tuple[Any, ...] = (torch.set_rng_state, random.setstate, np.random.set_state)
        for restore, saved in zip(restores, generators, strict=True):
            restore(saved)
        assert list(islice(training(resumed), 9)) == rest


class OwnNoise(Numbers):
    """Samples with random numbers from generators that the dataset holds."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.in_torch = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        in_torch = torch.rand((), generator=self.in_torch).item()
        return index, self.python.random(), self.numpy.random(), self.old.random(), in_torch


@pytest.mark.parametrize("inside", [False, True])
def test_a_resumed_dataset_draws_the_same_from_generators_of_its_own(inside: bool) -> None:
    def prepared() -> Any:
        dataset: Any = OwnNoise(SIZE)
        if inside:
            dataset = ConcatDataset([Numbers(0), Subset(dataset, range(SIZE))])
        generator = torch.Generator().manual_seed(2)
        return worlds(DataLoader(dataset, 3, shuffle=True, generator=generator, collate_fn=list), 1)[0]

    def passes(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    for done in (0, 2, 6, 7, 9):
        loader, between, resumed = prepared(), prepared(), prepared()
        run = passes(loader)
        list(islice(run, done))
        between.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        resumed.load_state_dict(between.state_dict())  # saved again before anything was read
        assert list(islice(passes(resumed), 9)) == list(islice(run, 9))
