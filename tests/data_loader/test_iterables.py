"""Iterable datasets: every rank reads everything, all end together, and a bookmark resumes them."""

import json
import logging
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_loader.reference import SizedStream, Stream, flat, handed, read, read_all, worlds
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, PartialState, StateError
from trainer_lib.data_loader import prepare_data_loader, skip_first_batches

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 7, 17])
def test_workers_share_and_all_processes_have_as_many_batches(size: int, num_workers: int) -> None:
    loader = DataLoader(Stream(size), batch_size=2, num_workers=num_workers)
    batches = [read_all(rank_loader) for rank_loader in worlds(loader, 2)]
    assert len(batches[0]) == len(batches[1])
    real = [
        sample
        for rank_loader in batches
        for handed in rank_loader
        for sample in handed.samples[: (handed.rows or (2, 2))[1]]
    ]
    assert sorted(real) == list(range(size))
    for rank_loader in batches:
        assert [handed.is_last for handed in rank_loader] == [False] * (len(rank_loader) - 1) + [True] * (
            len(rank_loader) > 0
        )
        assert all(len(handed.samples) == 2 for handed in rank_loader)


class Lopsided(IterableDataset[int]):
    """A dataset of which one worker has one sample, and the other all others."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return iter(range(1) if worker.id == 0 else range(1, 10))


def test_a_tail_may_come_before_whole_batches() -> None:
    loader = DataLoader(Lopsided(), batch_size=2, num_workers=2)
    first, second = (read_all(rank_loader) for rank_loader in worlds(loader, 2))
    assert [handed.samples for handed in first] == [[0, 0], [1, 2], [5, 6], [9, 1]]
    assert [handed.rows for handed in first] == [(2, 1), None, None, (2, 1)]
    assert [handed.rows for handed in second] == [(2, 0), None, None, (2, 0)]


class Tuples(IterableDataset[Any]):
    """Samples that are tuples of a text and an object."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(f"text {index}", {"index": index}) for index in range(5)])


def _listed(samples: list[Any]) -> list[Any]:
    assert all(type(sample) is tuple for sample in samples)
    return samples


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_collate_sees_plain_samples(num_workers: int) -> None:
    loader = DataLoader(Tuples(), batch_size=2, num_workers=num_workers, collate_fn=_listed)
    for rank, prepared in enumerate(worlds(loader, 2)):
        batches = [([index["index"] for _, index in batch], prepared.rows) for batch in prepared]
        assert batches == [([[0, 1], [2, 3]][rank], None), ([[4, 0], [1, 2]][rank], (2, 1 - rank, 2))]
        assert prepared.collate_fn is _listed
        prepared.collate_fn = len
        assert list(prepared) == [2, 2]


class Ready(IterableDataset[Any]):
    """Its samples are batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([index, index + 10, index + 20]) for index in range(5)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_come_ready_are_shared_as_they_are(num_workers: int) -> None:
    loader = DataLoader(Ready(), batch_size=None, num_workers=num_workers)
    first, second = (read_all(rank_loader) for rank_loader in worlds(loader, 2))
    assert [handed.samples[0] for handed in first] == [0, 2, 4]
    assert [handed.samples[0] for handed in second] == [1, 3, 0]
    assert [handed.rows for handed in second] == [None, None, (3, 0)]
    assert [handed.is_last for handed in second] == [False, False, True]


class Configured(IterableDataset[int]):
    """The dataset of torch's own example, whose worker_init_fn tells each worker its part."""

    start, end = 0, 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def _configure(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    per_worker = (dataset.end - dataset.start) // info.num_workers
    dataset.start += worker * per_worker
    dataset.end = dataset.start + per_worker


def test_a_worker_init_fn_reaches_the_users_dataset() -> None:
    loader = DataLoader(Configured(), batch_size=2, num_workers=2, worker_init_fn=_configure)
    samples = [sample for rank_loader in worlds(loader, 2) for batch in read(rank_loader) for sample in batch]
    # Six samples a worker: a round of four, and two filled with two.
    assert sorted(set(samples)) == list(range(12))
    assert len(samples) == 16


# -- random numbers --------------------------------------------------------------------------------------------------


class Shuffling(IterableDataset[int]):
    """A dataset that shuffles by the generators everybody has, and by one of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(20, generator=self.generator).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        for index in order:
            yield (index + int(torch.randint(2, ()))) % 20


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_shuffles_has_one_order_for_all_and_a_resume(num_workers: int) -> None:
    def prepared(processes: int, rank: int) -> Any:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(10 * processes + rank)
        loader = DataLoader(Shuffling(), batch_size=4 // processes, num_workers=num_workers)
        return prepare_data_loader(
            loader, num_processes=processes, process_index=rank, data_seed=5, low_memory_shuffle=True
        )

    (alone, first, second) = (prepared(1, 0), prepared(2, 0), prepared(2, 1))
    whole = [read(alone), read(alone)]
    assert whole[0] != whole[1]
    for resumed_loader in whole:
        assert [left + right for left, right in zip(read(first), read(second), strict=True)] == resumed_loader
    saving = prepared(1, 0)
    list(islice(saving, 2))
    resumed = prepared(1, 0)
    resumed.load_state_dict(saving.state_dict())
    assert [read(resumed), read(resumed)] == [whole[0][2:], whole[1]]


def test_reading_leaves_the_generators_of_training_alone() -> None:
    loader = DataLoader(Shuffling(), batch_size=4)
    loader = prepare_data_loader(loader, num_processes=1, process_index=0, low_memory_shuffle=True)

    def drawn(source: Any) -> list[Any]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        return [(random.random(), np.random.random(), torch.rand(1).item()) for _ in source]

    assert drawn(loader) == drawn(range(5))


# -- bookmarks -------------------------------------------------------------------------------------------------------


class Keeping(Stream):
    """A dataset that knows where it is."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at, self.resumed = 0, 0

    def __iter__(self) -> Iterator[int]:
        first, self.resumed = self.resumed, 0
        for number in range(first, self.size):
            self.reads += 1
            self.at = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = state["at"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_dataset_that_keeps_its_place_is_not_read_from_the_beginning(processes: int) -> None:
    def prepared() -> Any:
        return worlds(DataLoader(Keeping(600), batch_size=4), processes)[-1]

    whole = read_all(prepared())
    for done in (0, 1, 15, 16, 17, 31, 32, 33, 40, len(whole) - 1):
        saving, resumed = prepared(), prepared()
        list(islice(saving, done))
        resumed.load_state_dict(json.loads(json.dumps(saving.state_dict())))
        assert read_all(resumed) == whole[done:], done
        # At most 16 rounds are read again, and one ahead.
        assert resumed.dataset.reads <= 600 - 4 * processes * max(0, done - 17)
        assert read_all(resumed) == whole


def test_a_bookmark_is_one_of_the_pass_it_is_in() -> None:
    (loader,) = worlds(DataLoader(Keeping(400), batch_size=4), 1)
    list(islice(loader, 60))
    assert loader.state_dict()["bookmark"]["position"] == 4 * 48
    skipping: Any = skip_first_batches(loader, 20)
    list(islice(skipping, 3))
    assert loader.state_dict()["position"] == 4 * 23
    assert loader.state_dict()["bookmark"] is None  # none of the pass before
    assert loader.state_dict() == skipping.state_dict()
    read(skipping)
    assert loader.state_dict()["bookmark"] is None


def test_after_a_bookmark_other_samples_fill_the_tail() -> None:
    # The first ones were not read, and cannot be asked for again.
    def prepared() -> Any:
        return worlds(DataLoader(Keeping(143), batch_size=4), 2)[1]

    whole = read_all(prepared())
    saving, resumed = prepared(), prepared()
    list(islice(saving, 17))
    resumed.load_state_dict(saving.state_dict())
    rest = read_all(resumed)
    assert rest[:-1] == whole[17:-1]
    assert rest[-1].rows == whole[-1].rows == (4, 3)
    assert rest[-1].samples[:3] == whole[-1].samples[:3]
    assert len(rest[-1].samples) == 4


class Wandering(Keeping):
    """One that draws random numbers on its way."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield (
                number + 1000 * random.randrange(10) + 100_000 * int(np.random.randint(10)) + int(torch.randint(9, ()))
            )


def test_a_bookmark_holds_the_random_numbers_too() -> None:
    def prepared() -> Any:
        loader = DataLoader(Wandering(400), batch_size=4)
        return prepare_data_loader(loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True)

    whole = read(prepared())
    saving, resumed = prepared(), prepared()
    list(islice(saving, 50))
    state = json.loads(json.dumps(saving.state_dict()))
    assert state["bookmark"]["position"] >= 4 * 33
    resumed.load_state_dict(state)
    assert read(resumed) == whole[50:]
    assert resumed.dataset.reads < 400 - 100


class OwnGenerators(IterableDataset[Any]):
    """A dataset that draws its order, and numbers on its way, from generators of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.in_torch = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(self.size, generator=self.in_torch).tolist():
            yield number, self.python.random(), self.numpy.random(), self.old.random()


class Around(IterableDataset[Any]):
    """A dataset of datasets inside."""

    def __init__(self, *datasets: IterableDataset[Any]) -> None:
        self.datasets = list(datasets)

    def __iter__(self) -> Iterator[Any]:
        for dataset in self.datasets:
            yield from dataset


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("done", [0, 2, 6, 7, 9])
def test_a_resumed_dataset_draws_the_same_from_generators_of_its_own(done: int, nested: bool) -> None:
    def prepared() -> Any:
        dataset = Around(Stream(2), OwnGenerators(19)) if nested else OwnGenerators(21)
        return prepare_data_loader(DataLoader(dataset, 3, collate_fn=list), num_processes=1, process_index=0)

    def passes(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    loader, resumed = prepared(), prepared()
    run = passes(loader)
    list(islice(run, done))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed.load_state_dict(state)
    assert list(islice(passes(resumed), 15)) == list(islice(run, 15))


def test_a_state_from_before_a_datasets_generators_were_saved_is_loaded() -> None:
    def prepared() -> Any:
        return prepare_data_loader(DataLoader(OwnGenerators(21), 3), num_processes=1, process_index=0)

    loader, resumed = prepared(), prepared()
    next(iter(loader))
    state = loader.state_dict()
    del state["sample_generators"]
    state["start"]["own"] = []
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 6


class Understated(SizedStream):
    """A stream with a length that was divided by the number of ranks."""

    def __len__(self) -> int:
        return self.size // 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_dataset_longer_than_its_length_is_warned_of(
    num_workers: int, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = prepare_data_loader(DataLoader(Understated(24), 2, num_workers=num_workers), num_processes=1)
    for _ in range(2):
        for number, _batch in enumerate(loader):
            if breaks and number == 6:
                break
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Understated yields more samples than its __len__ says: 6, and at least ")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_dataset_as_long_as_its_length_is_not_warned_of(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    for size in range(1, 12):
        for loader in worlds(DataLoader(SizedStream(size), 2, num_workers=num_workers), 2):
            list(loader)
    assert caplog.records == []


class Whole(IterableDataset[Any]):
    """A stream that each worker reads as a whole."""

    def __init__(self, size: int, value: int | None = None) -> None:
        self.size, self.value = size, value

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            yield number if self.value is None else self.value


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_workers_that_read_the_same_samples_are_warned_of_once(
    batch_size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader = prepare_data_loader(DataLoader(Whole(6), batch_size, num_workers=2), num_processes=1)
    for _ in range(2):
        assert len(flat([[batch] if batch_size is None else batch for batch in loader])) == 12  # as without us
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("1 of the 2 workers read the same first samples of Whole as another one")
    assert "info = torch.utils.data.get_worker_info()" in warning


def test_workers_are_not_warned_of_where_samples_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    for dataset, num_workers in ((Stream(6), 2), (Whole(6), 1), (Whole(6, value=0), 2), (Whole(0), 2)):
        list(prepare_data_loader(DataLoader(dataset, 2, num_workers=num_workers), num_processes=1))
    assert caplog.records == []


class Recalling(Keeping):
    """One that knows its position, and not what its generator has drawn."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.numpy = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number + 1000 * int(self.numpy.integers(10))


def test_a_bookmark_holds_a_datasets_own_generators_too() -> None:
    def prepared() -> Any:
        return prepare_data_loader(DataLoader(Recalling(400), 4), num_processes=1, process_index=0)

    loader, resumed = prepared(), prepared()
    run = iter(loader)
    list(islice(run, 50))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed.load_state_dict(state)
    assert read(resumed) == [batch.tolist() for batch in run]
    assert resumed.dataset.reads < 400 - 100


@pytest.mark.parametrize(
    ("num_workers", "keeps"),
    [
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_the_workers_of_a_stateful_loader_keep_their_places(num_workers: int, keeps: bool) -> None:
    def prepared() -> Any:
        dataset = Keeping(80) if keeps else Stream(150)
        return worlds(StatefulDataLoader(dataset, batch_size=2, num_workers=num_workers), 2)[1]

    whole = read_all(prepared())
    for done in (3, 18):
        saving, resumed = prepared(), prepared()
        list(islice(saving, done))
        state = json.loads(json.dumps(saving.state_dict()))
        assert (state["bookmark"] is not None) == (done >= 16)
        resumed.load_state_dict(state)
        next(iter(resumed))
        assert resumed.state_dict()["bookmark"] == state["bookmark"]  # still the best there is
        resumed.load_state_dict(state)
        assert read_all(resumed) == whole[done:], done
        assert read_all(resumed) == whole


# -- datasets that are split already ---------------------------------------------------------------------------------


class Split(IterableDataset[int]):
    """A dataset of which each process reads a part of its own, of another size."""

    is_split_between_processes = True

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        rank = PartialState().process_index
        return iter(range(100 * rank, 100 * rank + self.sizes[rank]))


def _split(sizes: list[int], num_workers: int, options: dict[str, Any]) -> list[Any]:
    loader = prepare_data_loader(DataLoader(Split(sizes), batch_size=2, num_workers=num_workers), **options)
    return [[handed(batch, loader) for batch in loader] for _ in range(2)]


@pytest.mark.parametrize(
    ("sizes", "num_workers"), [([5, 2], 0), ([2, 5], 1), ([4, 4], 0), ([0, 3], 0), ([3, 0], 1), ([0, 0], 0)]
)
def test_processes_with_data_of_their_own_end_together(sizes: list[int], num_workers: int) -> None:
    results = run_world(_split, (sizes, num_workers, {}), 2, timeout=60)
    rounds = -(-max(sizes) // 2)
    for rank, passes in enumerate(results):
        assert passes[0] == passes[1]
        batches = passes[0]
        assert [handed.is_last for handed in batches] == [index == rounds - 1 for index in range(rounds)]
        real = [sample for handed in batches for sample in handed.samples[: (handed.rows or (2, 2))[1]]]
        assert real == list(range(100 * rank, 100 * rank + sizes[rank]))
        assert all(len(handed.samples) == 2 for handed in batches)


def test_or_each_for_itself_if_they_need_not_be_even() -> None:
    results = run_world(_split, ([5, 2], 0, {"even_batches": False}), 2, timeout=60)
    assert [[handed.samples for handed in passes[0]] for passes in results] == [[[0, 1], [2, 3], [4]], [[100, 101]]]


def test_a_split_for_another_world_is_no_place_to_go_on_from() -> None:
    state = worlds(DataLoader(Split([4, 4]), batch_size=2), 2)[0].state_dict()
    with pytest.raises(StateError, match=r"split between 2 ranks.*between 3"):
        worlds(DataLoader(Split([4, 4]), batch_size=2), 3)[0].load_state_dict(state)


def test_nobody_reads_for_all_what_is_split() -> None:
    def refusal() -> str:
        with pytest.raises(ConfigurationError) as caught:
            prepare_data_loader(DataLoader(Split([4, 4])), dispatch_batches=True)
        return str(caught.value)

    results = run_world(refusal, (), 2, timeout=60)
    assert all("for all ranks, but this Split" in message for message in results)


class CountedByItsLoader(IterableDataset[int]):
    """A dataset with a state that only its library's own loader can ask for."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(48))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError((num_samples, from_beginning))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_needs_arguments_is_not_asked_for(num_workers: int) -> None:
    def prepared() -> Any:
        loader = DataLoader(CountedByItsLoader(), batch_size=2, num_workers=num_workers)
        return prepare_data_loader(loader, num_processes=1, process_index=0)

    saving, resumed = prepared(), prepared()
    first = [batch.tolist() for batch in islice(saving, 20)]
    resumed.load_state_dict(saving.state_dict())
    assert flat([*first, *(batch.tolist() for batch in resumed)]) == [*range(48)]


class SplitByItself(IterableDataset[int]):
    """A dataset that yields every second number on each of two ranks."""

    def __iter__(self) -> Iterator[int]:
        yield from range(PartialState().process_index, 16, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_declared", [False, True])
def test_ranks_warn_if_a_dataset_that_splits_itself_does_not_say_so(is_declared: bool, num_workers: int) -> None:
    def body() -> tuple[list[str], list[list[int]]]:
        messages = list[str]()
        logger, handler = logging.getLogger("trainer_lib.data_loader.prepared_loader"), logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        dataset = SplitByItself()
        if is_declared:
            dataset.is_split_between_processes = True  # type: ignore[attr-defined]
        prepared = Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=2, num_workers=num_workers))
        read(Accelerator(cpu=True).prepare(DataLoader(Stream(16), batch_size=2)))
        passes = [flat(read(prepared)) for _ in range(2)]
        logger.removeHandler(handler)
        return messages, passes

    results = run_world(body, num_processes=2)
    messages = [message for warned, _ in results for message in warned]
    passes = [first for _, (first, second) in results if first == second]
    if is_declared:
        assert messages == []
        assert passes == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    else:
        assert passes == [[0, 2, 8, 10], [5, 7, 13, 15]]
        assert len(messages) == 1
        assert re.match(
            r"Rank (0|1) reads other samples of SplitByItself than rank (1|0)\. .* "
            r"set its attribute is_split_between_processes = True before prepare\.",
            messages[0],
        )
