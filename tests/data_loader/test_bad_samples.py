"""Samples that cannot be read: the error names them and the worker, or they are skipped and reported."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data_loader.reference import Numbers, Stream
from trainer_lib import UnsupportedError
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.foundation.errors import BadSampleError
from trainer_lib.process_group import LoneProcess


class UnreadableError(Exception):
    pass


class Holed(Numbers):
    """Numbers of which some cannot be read."""

    def __init__(self, size: int, *holes: int, error: type[Exception] = UnreadableError) -> None:
        super().__init__(size)
        self.holes, self.error = holes, error
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index in self.holes:
            raise self.error(f"no sample {index}")
        return super().__getitem__(index)


class HoledInBulk(Holed):
    """The same, read many at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Killing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Ending(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise UnreadableError("no more")


def _cut_off(samples: list[int]) -> torch.Tensor:
    if 5 in samples:
        raise UnreadableError("five")
    return torch.tensor(samples)


def _prepared(dataset: Any, **options: Any) -> Any:
    loader = DataLoader(dataset, batch_size=3, **options)
    return prepare_data_loader(loader, num_processes=1, process_index=0, data_seed=0, low_memory_shuffle=True)


def _quarantine(most: int = 10) -> Quarantine:
    return Quarantine(LoneProcess(), most, "max_bad_samples")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Holed(8, 5), {}),
        (HoledInBulk(8, 5), {"shuffle": True}),
        (Holed(8, 5), {"batch_size": None}),
        (Numbers(8), {"collate_fn": _cut_off, "shuffle": True}),
        (Ending(), {}),
    ],
    ids=["map", "map in bulk", "without batches", "collate", "iterable"],
)
def test_an_error_names_the_sample_and_the_worker(dataset: Any, options: dict[str, Any], workers: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "num_workers": workers, **options}
    loader = prepare_data_loader(DataLoader(dataset, **arguments), num_processes=1, process_index=0)
    with pytest.raises(UnreadableError) as raised:
        list(loader)
    (note,) = raised.value.__notes__
    assert note in ([f"In sample 5, read by worker {worker}." for worker in (0, 1)] if workers else ["In sample 5."])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_whole_batch_names_its_samples(workers: int) -> None:
    stream = _prepared(Stream(8), collate_fn=_cut_off, num_workers=workers)
    with pytest.raises(UnreadableError) as raised:
        list(stream)
    by = ", read by worker 0" * workers
    assert raised.value.__notes__ == [f"In the batch of samples 3, 4, 5{by}."]
    ragged = _prepared([[1], [2], [3], [4, 4], [5], [6]], num_workers=workers)
    with pytest.raises(RuntimeError, match="equal size") as raised_later:
        list(ragged)
    assert raised_later.value.__notes__ == [f"In the batch of samples 3, 4, 5{by}."]


def test_a_sample_that_says_stop_does_not_end_the_pass() -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        list(_prepared(Holed(8, 5, error=StopIteration)))
    assert raised.value.__notes__ == ["In sample 5."]


def test_a_killed_worker_is_named_with_its_samples() -> None:
    loader = _prepared(Killing(24), num_workers=2, prefetch_factor=1)
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        list(loader)
    (note,) = raised.value.__notes__
    assert note.startswith("Worker 1 (pid ")
    assert "was killed by SIGKILL, maybe because it used too much memory. It had to read samples 9, 10, 11" in note


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Holed, HoledInBulk])
def test_bad_samples_leave_their_batches(kind: type[Holed], workers: int) -> None:
    whole = _prepared(Numbers(17), shuffle=True, num_workers=workers)
    expected = [[index for index in batch.tolist() if index not in (2, 7, 16)] for batch in whole]
    loader, quarantine = _prepared(kind(17, 2, 7, 16), shuffle=True, num_workers=workers), _quarantine()
    loader.skip_bad_samples(quarantine)
    seen: list[list[int]] = []
    for batch in loader:
        seen.append(batch.tolist())
        assert loader.sample_ids() == seen[-1]
        assert loader.rows is None or loader.rows.real == loader.rows.total == len(seen[-1])
    assert seen == expected
    assert {(entry.index, entry.epoch, entry.process, entry.error) for entry in quarantine.sync_across_ranks()} == {
        (bad, 0, 0, f"UnreadableError: no sample {bad}") for bad in (2, 7, 16)
    }
    assert all((entry.worker in (0, 1)) if workers else (entry.worker is None) for entry in quarantine.agreed.values())


def test_what_was_bad_is_not_read_again_in_later_passes_also_after_a_resume() -> None:
    dataset = Holed(17, 2, 7, 16)
    loader, quarantine = _prepared(dataset, shuffle=True), _quarantine()
    loader.skip_bad_samples(quarantine)
    list(loader)
    quarantine.sync_across_ranks()
    dataset.asked.clear()
    second: list[list[int]] = []
    states: list[Any] = []
    for batch in loader:
        second.append(batch.tolist())
        states.append((loader.state_dict(), quarantine.state_dict()))
    assert sorted(dataset.asked) == [index for index in range(17) if index not in dataset.holes]
    assert not quarantine.sync_across_ranks()

    resumed, known = _prepared(dataset, shuffle=True), _quarantine()
    resumed.skip_bad_samples(known)
    resumed.load_state_dict(states[1][0])
    known.load_state_dict(states[1][1])
    dataset.asked.clear()
    assert [batch.tolist() for batch in resumed] == second[2:]
    assert not set(dataset.asked) & set(dataset.holes)


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"seeds": True}], ids=["persistent", "seeded"])
def test_workers_that_live_on_and_seeded_samples_leave_out_the_same(options: dict[str, Any]) -> None:
    seeds = options.pop("seeds", False)
    data_loader = DataLoader(
        HoledInBulk(17, 2, 7, 16), batch_size=3, shuffle=True, num_workers=0 if seeds else 2, **options
    )
    loader = prepare_data_loader(
        data_loader, num_processes=1, process_index=0, data_seed=0, low_memory_shuffle=True, seed_each_sample=seeds
    )
    quarantine = _quarantine()
    loader.skip_bad_samples(quarantine)
    whole = _prepared(Numbers(17), shuffle=True)
    for skipped in (3, 0, 0):
        expected = [[index for index in batch.tolist() if index not in (2, 7, 16)] for batch in whole]
        assert [batch.tolist() for batch in loader] == expected
        assert len(quarantine.sync_across_ranks()) == skipped


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batched", [True, False])
def test_a_batch_of_which_nothing_is_left_has_a_stand_in_that_does_not_count(workers: int, batched: bool) -> None:
    data_loader = DataLoader(Holed(9, 3, 4, 5), batch_size=3 if batched else None, num_workers=workers)
    loader = prepare_data_loader(data_loader, num_processes=1, process_index=0)
    loader.skip_bad_samples(_quarantine())
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # as torch's iterator draws the seed of its workers
    before = torch.random.get_rng_state()
    torch.manual_seed(0)
    left = [batch for batch in loader if loader.rows is None or loader.rows.real]
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(left) == (2 if batched else 6)
    assert sum(torch.as_tensor(batch).numel() for batch in left) == 6


def test_the_samples_that_fill_a_round_do_not_count_beside_bad_ones() -> None:
    loaders = [
        prepare_data_loader(DataLoader(Holed(9, 0, 8), batch_size=3), num_processes=2, process_index=rank)
        for rank in range(2)
    ]
    rows: list[list[Any]] = []
    for loader in loaders:  # rounds: 0 to 5; then 6 to 8 and, to fill it, 0 to 2
        loader.skip_bad_samples(_quarantine())
        rows.append([(batch.tolist(), loader.rows and loader.rows[:2], loader.sample_ids()) for batch in loader])
    assert rows[0] == [([1, 2], (2, 2), [1, 2]), ([6, 7], (2, 2), [6, 7])]
    assert rows[1] == [([3, 4, 5], None, [3, 4, 5]), ([1, 2], (2, 0), [])]


def test_bad_collates_are_left_out_one_by_one() -> None:
    loader, quarantine = _prepared(Numbers(8), collate_fn=_cut_off), _quarantine()
    loader.skip_bad_samples(quarantine)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4], [6, 7]]
    assert [entry.error for entry in quarantine.sync_across_ranks()] == ["UnreadableError: five"]


def test_too_many_end_the_pass_and_are_told() -> None:
    loader = _prepared(Holed(30, 2, 3, 11, 12, 20))
    loader.skip_bad_samples(_quarantine(most=3))
    read: list[Any] = []
    with pytest.raises(BadSampleError, match=r"4 samples could not be read, and max_bad_samples allows 3.*11 \(Unread"):
        read.extend(loader)
    assert len(read) == 4


def test_what_cannot_leave_samples_out_says_so() -> None:
    with pytest.raises(UnsupportedError, match="iterable dataset"):
        _prepared(Stream(8)).skip_bad_samples(_quarantine())


def test_a_collate_function_that_is_set_later_is_the_one_that_counts() -> None:
    loader = _prepared(Numbers(6))
    loader.collate_fn = sum
    assert list(loader) == [3, 12]
    assert loader.collate_fn is sum
