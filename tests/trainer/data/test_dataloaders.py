"""DataLoaders of many forms of data: each sample once, in one global order, with limits on the batches."""

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.data_loader.reference import Numbers, SizedStream, Stream, flat, read, read_all, worlds
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.data_loader import SeedableRandomSampler, prepare_data_loader
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.trainer.data.collate import collate
from trainer_lib.trainer.data.dataloaders import eval_loader, train_loader
from trainer_lib.trainer.data.datasets import Columns

SIZE = 23
LENGTHS = np.random.default_rng(0).integers(1, 9, SIZE).tolist()


class RandomStream(IterableDataset[int]):
    """An iterable dataset with random samples that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(1000, ())) + 1000 * self.epoch


class StatefulStream(Stream):
    """An iterable dataset with a state."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        yield from range(start, self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"start": 5}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["start"]


# -- the forms of data -----------------------------------------------------------------------------------------------

X, Y = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])


def _first(data: Any, **options: Any) -> Any:
    return next(iter(eval_loader(data, batch_size=2, **options)))


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X, Y.tolist()),
        [(X[index], int(Y[index])) for index in range(4)],
        tuple((X[index], int(Y[index])) for index in range(4)),
        torch.utils.data.Subset(TensorDataset(X, Y), range(4)),
    ],
    ids=["TensorDataset", "tensors", "arrays", "a tensor and a list", "list of samples", "tuple of samples", "Subset"],
)
def test_pairs_come_as_a_list_of_two_tensors(data: Any) -> None:
    batch = _first(data)
    assert type(batch) is list
    assert torch.equal(batch[0], X[:2])
    assert torch.equal(batch[1], Y[:2])
    assert batch[1].dtype == torch.int64


@pytest.mark.parametrize(
    "data",
    [
        {"x": X, "y": Y},
        {"x": X.numpy(), "y": Y.tolist()},
        [{"x": X[index], "y": int(Y[index])} for index in range(4)],
        [{"x": X[index].tolist(), "y": int(Y[index])} for index in range(4)],
        datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}),
        datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch"),
        datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).to_iterable_dataset(),
    ],
    ids=["tensors", "arrays", "samples", "samples of lists", "datasets", "datasets of tensors", "streaming"],
)
def test_named_data_comes_as_a_dict(data: Any) -> None:
    batch = _first(data)
    assert list(batch) == ["x", "y"]
    assert torch.equal(batch["x"], X[:2])
    assert torch.equal(batch["y"], Y[:2])
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float32, torch.int64)


class NoTruth(UserDict[str, torch.Tensor]):
    """A mapping of columns that has a length, but no truth, as a TensorDict."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def test_a_mapping_without_truth_is_read() -> None:
    batch = _first(NoTruth({"x": X, "y": Y}))
    assert torch.equal(batch["x"], X[:2])
    assert torch.equal(batch["y"], Y[:2])


def test_texts_single_arrays_and_tables_are_read() -> None:
    assert _first(["a", "b", "c"]) == ["a", "b"]
    assert torch.equal(_first(X), X[:2])
    assert torch.equal(_first(X.numpy().astype(np.float64)), X[:2].double())
    table = pandas.DataFrame({"x": [1.5, 2.5], "name": ["a", "b"], "n": [1, 2]})
    batch = _first(table)
    assert batch["name"] == ["a", "b"]
    assert torch.equal(batch["x"], torch.tensor([1.5, 2.5], dtype=torch.float64))
    assert torch.equal(batch["n"], torch.tensor([1, 2]))
    texts = _first((["a", "b", "c"], Y[:3]))
    assert texts[0] == ["a", "b"]


def test_memory_mapped_arrays_are_never_written_to(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for options in ({}, {"collate_fn": list}):
        batch = _first((mapped, Y), **options)
        if options:
            batch = [torch.stack([sample[0] for sample in batch])]
        batch[0] += 1
        assert torch.equal(batch[0], X[:2] + 1)
    assert np.array_equal(mapped, X.numpy())


def test_columns_and_samples_give_equal_batches() -> None:
    pairs = [(X[index], Y[index]) for index in range(4)]
    cases: list[dict[str, Any]] = [{"shuffle": False, "num_workers": 1}, {"shuffle": True, "seed": 3}]
    for options in cases:
        by_column = list(train_loader((X, Y), batch_size=3, **options))
        by_sample = list(train_loader(pairs, batch_size=3, **options))
        for actual, expected in zip(by_column, by_sample, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


def test_a_collate_function_gets_a_list_of_samples() -> None:
    seen: list[Any] = []

    def record(samples: list[Any]) -> str:
        seen.append(samples)
        return "batch"

    assert _first((X, Y), collate_fn=record) == "batch"
    (samples,) = seen
    assert type(samples) is list
    assert type(samples[0]) is tuple
    assert torch.equal(samples[1][0], X[1])


def test_seed_each_sample_works_with_arrays() -> None:
    loader = prepare_data_loader(
        eval_loader((X, Y), batch_size=3), num_processes=1, process_index=0, seed_each_sample=True
    )
    assert torch.equal(next(iter(loader))[0], X[:3])


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_parts_of_pandas_are_arrays() -> None:
    table, labels = pandas.DataFrame({"a": [1.5, 2.5], "b": [3.5, 4.5]}), pandas.Series([0, 1])
    inputs, targets = next(iter(train_loader((table, labels), batch_size=2, shuffle=False)))
    assert (inputs.tolist(), targets.tolist()) == ([[1.5, 3.5], [2.5, 4.5]], [0, 1])
    batch = next(iter(train_loader({"x": table, "labels": labels}, batch_size=2, shuffle=False)))
    assert (batch["x"].tolist(), batch["labels"].tolist()) == ([[1.5, 3.5], [2.5, 4.5]], [0, 1])


class DataModule:
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "train_dataset is a NoneType. Give a dataset"),
        ("data.csv", "'data.csv', a name or path and not the data itself"),
        (iter([1, 2]), "can be read only once"),
        ((index for index in range(3)), "is a generator, which can be read only once"),
        (Numbers, "is the class Numbers"),
        ([DataLoader(Numbers(4)), DataLoader(Numbers(4))], "is a list of DataLoaders. Give several sets"),
        ((Numbers(4), Numbers(4)), "is a tuple of Numberss. Give several sets to evaluate on by name"),
        (3, "is a int"),
        (NoLength(), "is a NoLength, which has no length"),
        (DataModule(), r"is the data module DataModule, and not its data: .* train_dataset=data.train_dataloader\(\)"),
        ([], "train_dataset is empty: this list has no samples"),
        ((X[:0], Y[:0]), "is empty"),
        (datasets.Dataset.from_dict({"x": []}), "is empty"),
        (SizedStream(0), "is empty"),
        ((X, Y[:3]), r"arrays of the same length, .* \(got 0: 4, 1: 3\)"),
        ({"x": X, "y": Y[:3]}, r"arrays of the same length, .* \(got 'x': 4, 'y': 3\)"),
        ((X, None), "is a tuple of Tensor and NoneType, and not all of them are arrays"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})}),
            "a DatasetDict of 'train', none of which",
        ),
        ({}, "none of which is an array"),
        (torch.tensor(3.0), "has no length"),
    ],
)
def test_unreadable_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_loader(data)


# -- the order -------------------------------------------------------------------------------------------------------


def test_shuffling_is_a_function_of_seed_and_epoch() -> None:
    (loader,) = worlds(train_loader(Numbers(SIZE), batch_size=4, seed=5), 1)
    first, second = flat(read(loader)), flat(read(loader))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SIZE))
    torch.manual_seed(1)
    (again,) = worlds(train_loader(Numbers(SIZE), batch_size=4, seed=5), 1)
    assert flat(read(again)) == first
    (other,) = worlds(train_loader(Numbers(SIZE), batch_size=4, seed=6), 1)
    assert flat(read(other)) != first
    (seeded_by_torch,) = worlds(train_loader(Numbers(SIZE), batch_size=4), 1)
    torch.manual_seed(1)
    (again,) = worlds(train_loader(Numbers(SIZE), batch_size=4), 1)
    assert flat(read(seeded_by_torch)) == flat(read(again))


def test_without_shuffling_samples_keep_their_order() -> None:
    for make in (train_loader, eval_loader):
        options: dict[str, Any] = {"shuffle": False} if make is train_loader else {}
        assert flat(read(make(Numbers(SIZE), batch_size=4, **options))) == list(range(SIZE))


def test_random_samples_of_an_iterable_dataset_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[int]:
        (loader,) = worlds(train_loader(RandomStream(), batch_size=4, seed=seed), 1)
        return flat(read(loader))

    torch.manual_seed(1)
    first = drawn(5)
    torch.manual_seed(2)
    assert drawn(5) == first != drawn(6)


def _two_epochs(make: Callable[[int], DataLoader[Any]]) -> list[list[list[int]]]:
    """Return the batches of two epochs on this rank, from a prepared loader."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(accelerator.num_processes))
    return [[(batch["n"] if isinstance(batch, dict) else batch).tolist() for batch in loader] for _ in range(2)]


SHARED: dict[str, Callable[[int], DataLoader[Any]]] = {
    "map": lambda n: train_loader(Numbers(24), batch_size=12 // n, seed=5),
    "columns": lambda n: train_loader(torch.arange(24), batch_size=12 // n, seed=5),
    "datasets": lambda n: train_loader(datasets.Dataset.from_dict({"n": list(range(24))}), batch_size=12 // n, seed=5),
    "iterable": lambda n: train_loader(Stream(24), batch_size=12 // n),
    "streaming": lambda n: train_loader(
        datasets.Dataset.from_dict({"n": list(range(24))}).to_iterable_dataset(), batch_size=12 // n
    ),
    "by length": lambda n: train_loader(
        [{"n": index, "length": LENGTHS[index % SIZE]} for index in range(24)],
        batch_size=12 // n,
        group_by_length=True,
        seed=5,
    ),
    "by weight": lambda n: train_loader(Numbers(24), batch_size=12 // n, sample_weights=range(24), seed=5),
    "limited": lambda n: train_loader(Numbers(40), batch_size=12 // n, limit_batches=2, num_processes=n, seed=5),
    "limited iterable": lambda n: train_loader(RandomStream(), batch_size=8 // n, limit_batches=2, num_processes=n),
    "limited loader": lambda n: train_loader(
        DataLoader(
            Numbers(40),
            batch_size=12 // n,
            sampler=RandomSampler(range(40), generator=torch.Generator().manual_seed(3)),
        ),
        limit_batches=2,
        num_processes=n,
    ),
    "overfit": lambda n: train_loader(Numbers(40), batch_size=12 // n, overfit_batches=2, num_processes=n),
    "overfit iterable": lambda n: train_loader(
        RandomStream(), batch_size=8 // n, overfit_batches=2, num_processes=n, seed=3
    ),
}
ONCE = {"map", "columns", "datasets", "iterable", "streaming", "by length"}


def test_two_ranks_together_read_what_one_reads() -> None:
    def read_all_kinds() -> dict[str, list[list[list[int]]]]:
        epochs_by_kind: dict[str, list[list[list[int]]]] = {}
        for kind, make in SHARED.items():
            torch.manual_seed(5)
            epochs_by_kind[kind] = _two_epochs(make)
        return epochs_by_kind

    alone = run_world(read_all_kinds, (), 1, timeout=60)[0]
    first, second = run_world(read_all_kinds, (), 2, timeout=60)
    for kind in SHARED:
        for number in range(2):
            batches = [flat(pair) for pair in zip(first[kind][number], second[kind][number], strict=True)]
            assert batches == alone[kind][number], kind
            samples = flat(flat(batch) if batch and isinstance(batch[0], list) else batch for batch in batches)
            assert sorted(samples) == list(range(24)) or kind not in ONCE, kind
            assert len(batches) == 2, kind


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: train_loader(Numbers(100), batch_size=4, limit_batches=3, num_processes=n),
        lambda n: train_loader(
            Numbers(100), batch_size=4, limit_batches=3, num_processes=n, sample_weights=[1.0] * 100
        ),
        lambda n: train_loader(Stream(100), batch_size=4, limit_batches=3, num_processes=n),
        lambda n: train_loader(SizedStream(100), batch_size=4, limit_batches=3, num_processes=n),
        lambda n: eval_loader(Numbers(100), batch_size=4, limit_batches=3, num_processes=n),
        lambda n: eval_loader(DataLoader(Numbers(100), batch_size=4), limit_batches=3, num_processes=n),
        lambda n: eval_loader(DataLoader(Numbers(100), batch_size=4, shuffle=True), limit_batches=3, num_processes=n),
        lambda n: eval_loader(DataLoader(Stream(100), batch_size=4), limit_batches=3, num_processes=n),
        lambda n: eval_loader(
            DataLoader(Numbers(100), batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 100, 100), 4, False)),
            limit_batches=3,
            num_processes=n,
        ),
        lambda n: eval_loader(
            DataLoader(Numbers(100), batch_sampler=[[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(25)]),
            limit_batches=3,
            num_processes=n,
        ),
        lambda n: train_loader(Numbers(100), batch_size=4, overfit_batches=3, num_processes=n),
        lambda n: train_loader(Stream(100), batch_size=4, overfit_batches=3, num_processes=n),
        lambda n: train_loader(
            DataLoader(Numbers(100), batch_size=4, shuffle=True), overfit_batches=3, num_processes=n
        ),
    ],
)
def test_each_rank_reads_the_limit_and_knows_the_last_batch(make: Any, processes: int) -> None:
    for loader in worlds(make(processes), processes):
        for _ in range(2):
            batches = read_all(loader)
            assert [len(batch.samples) for batch in batches] == [4, 4, 4]
            assert [batch.is_last for batch in batches] == [False, False, True]
            assert [batch.rows for batch in batches] == [None, None, None]


def test_a_limit_beyond_the_data_changes_nothing() -> None:
    for data in (Numbers(SIZE), SizedStream(SIZE), Stream(SIZE)):
        assert flat(read(eval_loader(data, batch_size=4, limit_batches=100))) == list(range(SIZE))
    assert len(eval_loader(SizedStream(SIZE), batch_size=4, limit_batches=2)) == 2
    assert len(eval_loader(SizedStream(SIZE), batch_size=4, limit_batches=100)) == 6
    with pytest.raises(TypeError):
        len(eval_loader(Stream(SIZE), batch_size=4, limit_batches=2))


def test_a_limited_shuffle_reads_other_samples_each_epoch() -> None:
    (loader,) = worlds(train_loader(Numbers(SIZE), batch_size=4, limit_batches=1, seed=3), 1)
    passes = [flat(read(loader)) for _ in range(40)]
    assert set(flat(passes)) == set(range(SIZE))
    assert isinstance(loader.get_sampler(), SeedableRandomSampler)


def test_overfitting_reads_the_same_samples_each_epoch() -> None:
    for data in (Numbers(SIZE), RandomStream(), DataLoader(Numbers(SIZE), batch_size=4, shuffle=True)):
        (loader,) = worlds(train_loader(data, batch_size=4, overfit_batches=2, seed=3), 1)
        passes = [read(loader) for _ in range(3)]
        assert passes[0] == passes[1] == passes[2]
        assert len(flat(passes[0])) == 8


def test_a_limited_iterable_resumes_at_its_position() -> None:
    for data in (Stream(100), StatefulStream(100)):
        (loader,) = worlds(train_loader(data, batch_size=4, limit_batches=30), 1)
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
        state = loader.state_dict()
        (resumed,) = worlds(train_loader(data, batch_size=4, limit_batches=22), 1)
        resumed.load_state_dict(state)
        assert read(resumed) == [[80, 81, 82, 83], [84, 85, 86, 87]]


def test_workers_share_a_limit() -> None:
    loader = train_loader(Stream(100), batch_size=4, limit_batches=3, num_workers=2)
    (prepared,) = worlds(loader, 1)
    batches = read(prepared)
    assert len(batches) == 3
    assert len(set(flat(batches))) == 12


def test_a_limit_counts_per_rank_where_the_dataset_is_already_split() -> None:
    class Split(Stream):
        is_split_between_processes = True

    loader = train_loader(Split(100), batch_size=4, limit_batches=3, num_processes=2)
    for prepared in worlds(loader, 2):
        assert flat(read(prepared)) == list(range(12))


def test_the_users_loader_stays_unchanged() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(SIZE), batch_size=4, shuffle=True)
    sampler = loader.sampler
    assert train_loader(loader) is loader
    assert eval_loader(loader) is loader
    limited = train_loader(loader, limit_batches=2)
    overfit = train_loader(loader, overfit_batches=2)
    assert limited is not loader
    assert (len(limited), len(overfit), len(loader)) == (2, 2, 6)
    assert loader.sampler is sampler
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.batch_sampler.sampler is sampler
    assert isinstance(overfit.sampler, SequentialSampler)


def test_a_loader_without_batch_size_is_limited_too() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(9), batch_size=None)
    assert [int(batch) for batch in train_loader(loader, limit_batches=2)] == [0, 1]
    stream: DataLoader[Any] = DataLoader(Stream(9), batch_size=None)
    assert [int(batch) for batch in train_loader(stream, limit_batches=2)] == [0, 1]


# -- options of the loader -------------------------------------------------------------------------------------------


def test_options_reach_the_loader() -> None:
    loader = train_loader(
        Numbers(SIZE), batch_size=4, num_workers=2, prefetch_factor=3, persistent_workers=True, drop_last=True
    )
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert (loader.drop_last, loader.batch_size, len(loader)) == (True, 4, 5)
    assert loader.pin_memory is torch.accelerator.is_available()
    assert train_loader(Numbers(SIZE), pin_memory=False).pin_memory is False


@pytest.mark.parametrize(
    ("accelerator", "data", "is_pinned"),
    [(None, X, False), ("cuda", X, True), ("cuda", X.to("meta"), False), ("mps", X, False), ("cuda", [1, 2], True)],
)
def test_memory_is_pinned_for_an_accelerator(accelerator: Any, data: Any, is_pinned: bool, monkeypatch: Any) -> None:
    # The machine may have no accelerator.
    present = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: present)
    assert eval_loader(data).pin_memory is is_pinned


def test_errors_of_collation_in_a_worker_name_the_field() -> None:
    loader = train_loader([{"ids": [1]}, {"ids": [1, 2]}], batch_size=2, num_workers=1, shuffle=False)
    iterator: Any = iter(loader)
    with pytest.raises(ConfigurationError, match="field 'ids' cannot be collated"):
        next(iterator)
    iterator._shutdown_workers()  # the error refers to the iterator: collecting it late takes 5 s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": "auto"}, "batch_size must be"),
        ({"limit_batches": 0}, "limit_batches must be"),
        ({"overfit_batches": 1.5}, "overfit_batches must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"prefetch_factor": 2}, "prefetch_factor has no effect with num_workers=0"),
        ({"persistent_workers": True}, "persistent_workers has no effect with num_workers=0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be"),
        ({"collate_fn": 3}, "collate_fn=3 must be a function"),
        ({"drop_last": True, "batch_size": 24}, "drop_last=True would drop all samples: train_dataset has 23 of them"),
        ({"drop_last": True, "batch_size": 12, "num_processes": 2}, "the batches of all ranks together need 24"),
        (
            {"limit_batches": 1, "overfit_batches": 1},
            "limit_batches and overfit_batches contradict each other: both set the number",
        ),
        ({"sample_weights": [1.0] * 23, "group_by_length": True}, "contradict each other: both set the order"),
        ({"sample_weights": [1.0] * 23, "shuffle": False}, "contradict each other: samples are drawn"),
        ({"group_by_length": True, "shuffle": False}, "contradict each other: it needs a random order"),
        (
            {"group_by_length": True, "overfit_batches": 1},
            "contradict each other: the batches are always the first ones",
        ),
        (
            {"sample_weights": [1.0] * 22},
            "sample_weights must have one weight per sample: it has 22, and train_dataset has 23",
        ),
        ({"group_by_length": True}, "no field 'length' and no 'input_ids'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_loader(Numbers(SIZE), **options)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Stream(9), {"group_by_length": True}, "group_by_length needs a map-style dataset"),
        (Stream(9), {"sample_weights": [1.0]}, "sample_weights needs a map-style dataset"),
        (DataLoader(Numbers(9)), {"sample_weights": [1.0]}, "sample_weights has no effect on a ready DataLoader"),
        (DataLoader(Numbers(9)), {"group_by_length": True}, "group_by_length has no effect on a ready DataLoader"),
        (DataLoader(Numbers(9)), {"drop_last": True}, "drop_last has no effect on a ready DataLoader"),
        (DataLoader(Numbers(0)), {}, "is empty: the Numbers of its DataLoader has no samples"),
        (Stream(0), {"overfit_batches": 1}, "is empty"),
    ],
)
def test_options_that_the_data_does_not_allow_are_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_loader(data, **options)


def test_some_loaders_cannot_be_overfit_or_limited() -> None:
    class Split(Stream):
        is_split_between_processes = True

    with pytest.raises(UnsupportedError, match="already split between them"):
        train_loader(Split(9), overfit_batches=1)
    with pytest.raises(UnsupportedError, match="an iterable dataset"):
        train_loader(DataLoader(Stream(9)), overfit_batches=1)
    with pytest.raises(UnsupportedError, match="a custom batch sampler"):
        train_loader(DataLoader(Numbers(9), batch_sampler=[[1, 2], [3]]), overfit_batches=1)
    (prepared,) = worlds(DataLoader(Numbers(9)), 1)
    assert train_loader(prepared) is prepared
    with pytest.raises(ConfigurationError, match="A prepared loader cannot be limited to 2 batches"):
        train_loader(prepared, limit_batches=2)


class Shared(Columns):
    """Returns whether its batch is in shared memory before the worker passes it on."""

    def batch(self, indices: list[int], collate: Any) -> Any:
        batch = super().batch(indices, collate)
        return batch, [rows.is_shared() for rows in batch.values()]


def test_workers_write_batches_into_the_memory_they_share() -> None:
    rows = np.arange(30.0).reshape(10, 3)
    columns = {"array": rows, "tensor": torch.from_numpy(rows), "half": torch.arange(10).to(torch.bfloat16)}
    here, there = (list(eval_loader(Shared(columns), batch_size=4, num_workers=workers)) for workers in (0, 1))
    assert [shared for _, shared in here] == [[False] * 3] * 3
    assert [shared for _, shared in there] == [[True] * 3] * 3
    for (batch, _), (other, _) in zip(here, there, strict=True):
        assert all(torch.equal(batch[name], other[name]) and batch[name].dtype == other[name].dtype for name in columns)


def test_indices_beyond_the_data_are_an_error_in_workers_too() -> None:
    columns = Columns(np.arange(10.0)).with_batched_reads()
    loader: Any = DataLoader(columns, batch_size=2, sampler=[9, 10], num_workers=1, collate_fn=collate)  # type: ignore[arg-type]
    iterator = iter(loader)
    with pytest.raises(IndexError):
        next(iterator)
    iterator._shutdown_workers()
