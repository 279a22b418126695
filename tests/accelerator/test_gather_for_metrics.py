"""Metrics over several processes: each sample once, whatever the tail."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError


class Numbers(Dataset[Any]):
    """0, 1, 2 … with their names."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": torch.tensor(index), "name": f"#{index}", "even": torch.tensor(index % 2 == 0)}


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(Numbers(self.size)[index] for index in range(self.size))


def _gathered(size: int, kind: str, options: dict[str, Any]) -> tuple[list[int], list[str], list[bool], list[int]]:
    accelerator = Accelerator(cpu=True, **options)
    dataset = Stream(size) if kind == "stream" else Numbers(size)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=kind == "shuffled"))
    numbers, names, even, nested = [], [], [], []
    for batch in loader:
        both = accelerator.gather_for_metrics({"number": batch["number"], "even": batch["even"]})
        numbers += both["number"].tolist()
        even += both["even"].tolist()
        names += accelerator.gather_for_metrics(batch["name"])
        nested += accelerator.gather_for_metrics((batch["number"], [batch["number"] * 2]))[1][0].tolist()
    return numbers, names, even, nested


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("size", [1, 3, 8, 9, 16, 17, 31])
def test_each_sample_comes_once_and_in_order(size: int, processes: int, kind: str) -> None:
    for numbers, names, even, nested in run_world(_gathered, (size, kind, {}), processes, timeout=60):
        assert numbers == list(range(size))
        assert names == [f"#{index}" for index in range(size)]
        assert even == [index % 2 == 0 for index in range(size)]
        assert nested == [index * 2 for index in range(size)]


@pytest.mark.parametrize("kind", ["map", "stream", "shuffled"])
@pytest.mark.parametrize("options", [{"split_batches": True}, {"dispatch_batches": True}])
@pytest.mark.parametrize("size", [1, 9, 17])
def test_so_it_does_in_other_ways_to_share_out(size: int, options: dict[str, Any], kind: str) -> None:
    for numbers, names, _, _ in run_world(_gathered, (size, kind, options), 2, timeout=60):
        assert sorted(numbers) == list(range(size))
        assert names == [f"#{number}" for number in numbers]


def test_the_order_of_a_shuffled_loader_is_that_of_one_process() -> None:
    def order(batch_size: int) -> list[int]:
        accelerator = Accelerator(cpu=True)
        generator = torch.Generator().manual_seed(11)
        loader = DataLoader(Numbers(32), batch_size=batch_size, shuffle=True, generator=generator)
        seen: list[int] = []
        for batch in accelerator.prepare(loader):
            seen += accelerator.gather_for_metrics(batch["number"]).tolist()
        return seen

    (alone,) = run_world(order, (8,), 1, timeout=60)
    assert sorted(alone) == list(range(32))
    assert alone != list(range(32))
    assert run_world(order, (4,), 2, timeout=60) == [alone] * 2
    assert run_world(order, (2,), 4, timeout=60) == [alone] * 4


def _filtered() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(16), batch_size=4))
    kept: list[int] = []
    for batch in loader:
        number = batch["number"]
        kept += accelerator.gather_for_metrics(number[number < 3]).tolist()
    return kept


def test_processes_may_keep_different_numbers_of_rows_even_none() -> None:
    assert run_world(_filtered, (), 2, timeout=60) == [[0, 1, 2]] * 2


def _tokens() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=4))
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch["number"].repeat_interleave(3)).tolist()
    return seen


def test_several_rows_a_sample_are_cut_with_their_sample() -> None:
    assert run_world(_tokens, (), 2, timeout=60) == [[i for i in range(9) for _ in range(3)]] * 2


def _filtered_in_the_tail() -> str:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=4))
    try:
        for batch in loader:
            accelerator.gather_for_metrics(batch["number"][:3])
    except ConfigurationError as error:
        return str(error)
    return "nothing was raised"


def test_rows_that_cannot_be_told_apart_from_repeats_are_an_error() -> None:
    results = run_world(_filtered_in_the_tail, (), 2, timeout=60)
    assert all("even_batches=False" in message for message in results), results


def _means(size: int, even_batches: bool) -> list[list[float]]:
    accelerator = Accelerator(cpu=True, even_batches=even_batches)
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=2))
    return [accelerator.gather_for_metrics(batch["number"].double().mean()).tolist() for batch in loader]


def test_a_mean_is_one_value_of_each_rank_whose_batch_has_real_samples() -> None:
    assert run_world(_means, (8, True), 2, timeout=60) == [[[0.5, 2.5], [4.5, 6.5]]] * 2
    assert run_world(_means, (5, True), 2, timeout=60) == [[[0.5, 2.5], [2.0]]] * 2  # 4 0, and 1 2, which are repeats
    assert _means(5, True) == [[0.5], [2.5], [4.0]]


def _outside_a_loop() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=4))
    last = [batch["number"] for batch in loader][-1]
    return accelerator.gather_for_metrics(last).tolist()


def test_after_the_loop_everything_is_gathered() -> None:
    assert [len(seen) for seen in run_world(_outside_a_loop, (), 2, timeout=60)] == [8, 8]


class Batches:
    """A user's batch sampler, which says how large a full batch is."""

    def __init__(self, batches: list[list[int]], batch_size: int = 4) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _counted(
    batches: list[list[int]], options: dict[str, Any], collate: Any = torch.tensor, full: int = 4
) -> tuple[list[float], list[float], int, int]:
    accelerator = Accelerator(cpu=True, **options)
    loader: Any = DataLoader(range(20), batch_sampler=Batches(batches), collate_fn=collate)  # type: ignore[arg-type]
    loader = accelerator.prepare(loader)
    rows, losses, samples, remainder = [], [], 0, -1
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch).tolist()
        losses += accelerator.gather_for_metrics(batch.float().mean().repeat(full)).tolist()
        samples += loader.samples_in_round
        remainder = accelerator.gradient_state.remainder
    return rows, losses, samples, remainder


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("batches", "remainders"),
    [
        ([[0, 1, 2, 3], [4, 5]], (2, 6)),
        ([[0, 1, 2]], (3, 3)),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], (0, 0)),
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], (0, 4)),
        ([[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10]], (1, 1)),
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]], (2, 6)),
    ],
)
def test_a_loss_counts_once_for_each_sample_of_a_users_batch(
    batches: list[list[int]], remainders: tuple[int, int], processes: int
) -> None:
    expected = [sum(batch) / len(batch) for batch in batches for _ in batch]
    count = len(expected)
    for dispatches in (False, True):
        options = {"dispatch_batches": dispatches}
        for got in run_world(_counted, (batches, options), processes, timeout=60):
            assert got == (list(range(count)), expected, count, remainders[processes - 1])


@pytest.mark.parametrize("dispatches", [False, True])
def test_a_loss_counts_once_for_each_sample_of_a_users_batch_that_is_split(dispatches: bool) -> None:
    batches, options = [[0, 1, 2, 3], [4, 5], [6, 7, 8]], {"split_batches": True, "dispatch_batches": dispatches}
    for rows, losses, samples, remainder in run_world(_counted, (batches, options, torch.tensor, 2), 2):
        assert rows == list(range(9))
        assert losses == [0.5, 0.5, 2.5, 2.5, 4, 5, 6.5, 6.5, 4]  # the last one's batch is 8, 0
        assert (samples, remainder) == (9, 3)


def test_packed_and_generated_batches_keep_their_rows() -> None:
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for rows, losses, samples, _ in run_world(_counted, (batches, {}, lambda row: torch.tensor([sum(row)])), 2):
        assert (rows, losses, samples) == ([6, 22, 27], [6] * 4 + [22] * 4 + [27] * 3, 11)
    for rows, *_ in run_world(_counted, ([[0], [1], [2]], {}, lambda row: torch.tensor(row * 4)), 2):
        assert rows == [0] * 4 + [1] * 4 + [2] * 4


def test_boxes_of_each_sample_are_gathered_as_objects() -> None:
    """Ranks have other numbers of images, and images other numbers of boxes."""

    def body() -> list[tuple[int, int]]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Numbers(7), batch_size=2))
        found: list[tuple[int, int]] = []
        for batch in loader:
            boxes = [{"boxes": torch.ones(int(number) % 3, 4), "number": number} for number in batch["number"]]
            gathered = accelerator.gather_for_metrics(boxes, use_gather_object=True)
            found += [(int(image["number"]), len(image["boxes"])) for image in gathered]
        return found

    assert run_world(body, num_processes=2) == [[(number, number % 3) for number in range(7)]] * 2
