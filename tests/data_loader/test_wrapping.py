"""What of a user's loader survives being prepared: everything but who reads what."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_loader.reference import Numbers, Stream, flat, read, read_all, worlds
from trainer_lib import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from trainer_lib.data_loader.order.samples_per_rank import Counted
from trainer_lib.state.gradient_state import Rows

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call


def _alone(loader: Any, **options: Any) -> Any:
    return prepare_data_loader(loader, num_processes=1, process_index=0, **options)


class Doubling(DataLoader[int]):
    """A user's loader that iterates in a way of its own and has more to say."""

    factor = 2
    passes = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.passes += 1
        for batch in super().__iter__():
            yield batch * self.factor

    def largest(self) -> int:
        return self.factor * (len(self.dataset) - 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [Numbers(7), Stream(7)])
def test_a_subclass_with_an_iteration_of_its_own_stays(dataset: Any, num_workers: int) -> None:
    loader = Doubling(dataset, batch_size=2, num_workers=num_workers)
    first, second = worlds(loader, 2)
    batches = read_all(first), read_all(second)
    assert [handed.samples for handed in batches[0]] == [[0, 2], [8, 10]]
    assert [handed.samples for handed in batches[1]] == [[4, 6], [12, 0]]
    assert [handed.is_last for handed in batches[1]] == [False, True]
    assert [handed.rows for handed in batches[1]] == [None, (2, 1)]
    assert first.passes == 1
    assert loader.passes == 0
    if isinstance(dataset, Numbers):
        assert first.largest() == 12
    first.factor = 3
    assert read(first)[1] == [12, 15]
    saving = worlds(loader, 2)[0]
    next(iter(saving))
    first.load_state_dict(saving.state_dict())
    assert read(first) == [[12, 15]]


class CountedStream(Stream):
    """An iterable dataset that knows how often it was read."""

    passes = 0


class Particular(DataLoader[int]):
    """A user's loader that iterates datasets of its kind in a way of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert isinstance(self.dataset, CountedStream)
        self.dataset.passes += 1
        yield from super().__iter__()


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_loader_that_asks_for_the_class_of_its_dataset_gets_it(context: str | None) -> None:
    dataset, workers = CountedStream(7), int(context is not None)
    loader = Particular(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)
    first, second = worlds(loader, 2)
    batches = read_all(first), read_all(second)
    assert [handed.samples for handed in batches[0]] == [[0, 1], [4, 5]]
    assert [handed.samples for handed in batches[1]] == [[2, 3], [6, 0]]
    assert [handed.rows for handed in batches[1]] == [None, (2, 1)]
    assert dataset.passes == 2
    assert first.dataset is dataset
    saving = worlds(loader, 2)[1]
    next(iter(saving))
    second.load_state_dict(saving.state_dict())
    assert read(second) == [[6, 0]]


def test_attributes_are_those_of_the_users_loader() -> None:
    dataset, collate, generator = Numbers(7), lambda rows: rows, torch.Generator()
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate, generator=generator, pin_memory=False, timeout=0)
    loader.name = "mine"  # type: ignore[attr-defined]
    stream: Any = DataLoader(Stream(7), 2, collate_fn=collate, generator=generator)
    for prepared in (_alone(loader), _alone(stream)):
        assert prepared._is_accelerate_prepared
        assert isinstance(prepared, DataLoader)
        assert (prepared.batch_size, prepared.num_workers, prepared.drop_last) == (2, 0, False)
        assert prepared.collate_fn is collate
        assert prepared.generator is generator
    prepared = _alone(loader)
    assert prepared.dataset is dataset
    assert prepared.name == "mine"
    assert isinstance(prepared.batch_sampler, BatchSamplerShard)
    assert isinstance(prepared.sampler, SequentialSampler)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = prepared.nothing
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        prepared.batch_size = 3
    prepared.collate_fn = sum
    assert list(prepared) == [1, 5, 9, 6]
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6]]


def test_the_users_loader_stays_as_it_is() -> None:
    for make in (lambda: DataLoader(Numbers(7), 2, shuffle=True), lambda: DataLoader(Stream(7), 2)):
        loader = make()
        before = dict(loader.__dict__)
        prepared = _alone(loader)
        read(prepared)
        assert loader.__dict__ == before
        assert sorted(flat(read(loader))) == list(range(7))


def _remember(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.marked = 100 + worker


class Marked(Numbers):
    marked = 0

    def __getitem__(self, index: int) -> int:
        return self.marked * 1000 + index


@pytest.mark.parametrize("seeds", [False, True])
def test_workers_are_set_up_by_the_user(seeds: bool) -> None:
    loader = DataLoader(
        Marked(8), batch_size=2, num_workers=2, worker_init_fn=_remember, persistent_workers=True, prefetch_factor=4
    )
    prepared = _alone(loader, seed_each_sample=seeds)
    expected = [[100_000, 100_001], [101_002, 101_003], [100_004, 100_005], [101_006, 101_007]]
    assert read(prepared) == expected
    workers = prepared._reader.loader._iterator._workers
    assert read(prepared) == expected
    assert prepared._reader.loader._iterator._workers is workers  # they lived on
    assert loader._iterator is None


def test_a_sampler_in_place_of_a_batch_sampler_is_shared() -> None:
    from torch.utils.data import BatchSampler

    class ByList(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    batches = BatchSampler(SequentialSampler(range(7)), batch_size=2, drop_last=False)
    first, second = worlds(DataLoader(ByList(7), sampler=batches, batch_size=None), 2)
    assert [read(first), read(second)] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert (first.total_batch_size, second.state_dict()["unit"]) == (4, "samples")


def test_sizes_are_those_of_all_processes() -> None:
    (loader, _) = worlds(DataLoader(Numbers(20), batch_size=4), 2)
    assert (loader.total_batch_size, loader.total_dataset_length, loader.batch_sampler.total_length) == (8, 20, 5)
    (split, _) = worlds(DataLoader(Numbers(20), batch_size=4), 2, split_batches=True)
    assert (split.total_batch_size, len(split)) == (4, 5)
    (stream, _) = worlds(DataLoader(Stream(20), batch_size=4), 2)
    assert stream.total_batch_size == 8
    (ready, _) = worlds(DataLoader(Stream(20), batch_size=None), 2)
    assert ready.total_batch_size is None
    with pytest.raises(TypeError):
        len(stream)


def test_a_stateful_loader_is_counted_by_what_the_user_got() -> None:
    loader = StatefulDataLoader(Numbers(40), batch_size=2, num_workers=2)
    prepared = _alone(loader)
    for _ in zip(range(3), prepared, strict=False):
        pass
    assert (prepared.state_dict()["position"], prepared.state_dict()["unit"]) == (6, "samples")
    options = {"data_seed": 5, "use_seedable_sampler": True}
    shuffled = _alone(StatefulDataLoader(Numbers(40), batch_size=2, shuffle=True), **options)
    assert read(shuffled) == read(_alone(DataLoader(Numbers(40), batch_size=2, shuffle=True), **options))
    assert isinstance(prepared._reader.loader, StatefulDataLoader)


def test_a_copy_reads_too() -> None:
    prepared = _alone(DataLoader(Numbers(5), batch_size=2))
    assert read(copy.copy(prepared)) == [[0, 1], [2, 3], [4]]
    assert "DataLoader" in repr(prepared)
    assert "rank 0 of 1" in repr(prepared)


def test_another_sampler_can_be_set() -> None:
    prepared = _alone(DataLoader(Numbers(4), batch_size=2))
    prepared.set_sampler([3, 2, 1, 0])
    assert read(prepared) == [[3, 2], [1, 0]]
    assert get_sampler(prepared) == [3, 2, 1, 0]
    with pytest.raises(UnsupportedError, match="iterable-style"):
        _alone(DataLoader(Stream(4))).set_sampler([0])


@pytest.mark.parametrize(("dataset", "seeds"), [(Stream(5), False), (Numbers(5), True)])
def test_what_workers_are_given_can_be_sent_to_them(dataset: Any, seeds: bool) -> None:
    # As a start method other than fork has to.
    (_, loader) = worlds(DataLoader(dataset, batch_size=2), 2, seed_each_sample=seeds)
    inner = loader._reader.loader
    sent, collate = pickle.loads(pickle.dumps((inner.dataset, inner.collate_fn)))
    assert sent.size == 5
    sent.size = 6
    assert sent.dataset.size == 6
    if not seeds:
        tail = list(sent)[-2:]
        assert collate(tail)[1:] == ((2, 0, 2), 2)
        assert collate(tail).batch.tolist() == [0, 1]


def test_counts_survive_pinning() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    counted = Counted(["text"], Rows(2, 1, 2), 3)
    assert pin_memory(counted) == counted
    assert type(pin_memory(counted)) is Counted


# -- made by hand ----------------------------------------------------------------------------------------------------


def test_loaders_can_be_made_from_a_dataset() -> None:
    assert read(DataLoaderShard(range(6), batch_size=4)) == [[0, 1, 2, 3], [4, 5]]
    assert read(DataLoaderShard(range(6), batch_size=4, skip_batches=1)) == [[4, 5]]
    assert read(DataLoaderShard(range(6), batch_size=4, drop_last=True)) == [[0, 1, 2, 3]]
    assert read(DataLoaderShard(range(6), batch_size=4, _drop_last=True)) == [[0, 1, 2, 3]]
    skipping = SkipDataLoader(range(16), batch_size=4, skip_batches=2)
    assert [len(skipping), read(skipping)] == [2, [[8, 9, 10, 11], [12, 13, 14, 15]]]
    shuffled = DataLoaderShard(range(6), batch_size=6, shuffle=True, iteration=1)
    assert shuffled.state_dict()["epoch"] == 1
    torch.manual_seed(3)
    order = read(shuffled)
    torch.manual_seed(3)
    assert order == read(DataLoader(range(6), batch_size=6, shuffle=True))  # type: ignore[arg-type]


def test_a_skipping_sampler_leaves_out_the_first_batches_of_each_pass() -> None:
    sampler = SkipBatchSampler([[0], [1], [2]], 2)
    assert [list(sampler), list(sampler), len(sampler), sampler.total_length] == [[[2]], [[2]], 1, 3]


def test_the_sampler_is_found_wherever_it_is() -> None:
    plain = DataLoader(Numbers(4), batch_size=2, shuffle=True)
    assert get_sampler(plain) is plain.sampler
    one_by_one = DataLoader(Numbers(4), batch_size=None)
    assert get_sampler(one_by_one) is get_sampler(_alone(one_by_one)) is one_by_one.sampler
    assert get_sampler(DataLoader(Numbers(4), batch_sampler=[[0]])) is None


# -- what cannot be prepared -----------------------------------------------------------------------------------------


def test_what_is_prepared_is_not_prepared_again() -> None:
    with pytest.raises(PreparationError, match="This DataLoaderShard is already prepared"):
        _alone(_alone(DataLoader(Numbers(4))))


def _with_a_state() -> Any:
    loader = StatefulDataLoader(Numbers(4))
    loader.load_state_dict(StatefulDataLoader(Numbers(4)).state_dict())
    return loader


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (lambda: [1, 2], {}, ConfigurationError, "needs a DataLoader \\(got list"),
        (lambda: DataLoader(Numbers(4)), {"torch_device_mesh": object()}, UnsupportedError, "torch_device_mesh"),
        (lambda: DataLoader(Stream(4)), {"seed_each_sample": True}, UnsupportedError, "the dataset is iterable"),
        (
            lambda: DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), num_replicas=2, rank=0)),
            {},
            PreparationError,
            "DistributedSampler already divides samples between 2 ranks",
        ),
        (_with_a_state, {}, PreparationError, "A state was loaded into this StatefulDataLoader"),
    ],
)
def test_what_cannot_be_prepared_is_told(value: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        worlds(value(), 2, **options)


@pytest.mark.parametrize(("processes", "index", "message"), [(2, 2, "between 0 and 1 .got 2"), (0, 0, "num_processes")])
def test_a_place_that_is_not_there_is_told(processes: int, index: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prepare_data_loader(DataLoader(Numbers(4)), num_processes=processes, process_index=index)


def test_a_distributed_sampler_for_one_process_is_a_sampler() -> None:
    sampler = DistributedSampler(Numbers(6), num_replicas=1, rank=0, seed=3)
    prepared = _alone(DataLoader(Numbers(6), batch_size=6, sampler=sampler))
    first, second = read(prepared), read(prepared)
    assert first != second
    assert sorted(first[0]) == list(range(6))


def test_batches_out_of_order_have_no_exact_position() -> None:
    with pytest.warns(UserWarning, match="in_order=False"):
        _alone(DataLoader(Numbers(4), num_workers=1, in_order=False))


@pytest.mark.parametrize(("loader", "message"), [([1], "needs a DataLoader"), (DataLoader(Numbers(4)), "num_batches")])
def test_what_cannot_be_skipped_is_told(loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        skip_first_batches(loader, 1 if message != "num_batches" else -1)


def test_the_names_are_there() -> None:
    assert issubclass(DataLoaderDispatcher, DataLoader)
    assert issubclass(DataLoaderShard, DataLoader)
    assert IterableDatasetShard(Stream(3)).size == 3
