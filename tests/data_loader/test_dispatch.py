"""One process reads for all: each gets what it would have read itself, whatever the objects, and nobody hangs."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pickle import PicklingError
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data_loader.reference import Handed, Numbers, Stream, by_hand, handed, read
from tests.worlds import run_world
from trainer_lib import ConfigurationError, PartialState
from trainer_lib.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from trainer_lib.foundation.errors import WorldError


def _everywhere(function: Callable[[], Any], processes: int = 2) -> list[Any]:
    return run_world(function, (), processes, timeout=60)


def _read(loader: DataLoader[Any], **options: Any) -> tuple[list[Handed], int | None]:
    prepared = prepare_data_loader(loader, dispatch_batches=True, data_seed=5, low_memory_shuffle=True, **options)
    batches = [handed(batch, prepared) for batch in prepared]
    try:
        return batches, len(prepared)
    except TypeError:
        return batches, None


def _loader(kind: str, size: int, batch_size: int, drop_last: bool = False) -> DataLoader[int]:
    dataset = Stream(size) if kind.startswith("stream") else Numbers(size)
    workers = 1 if kind.endswith("with a worker") else 0
    return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, num_workers=workers)


MODES: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True},
    "split, uneven": {"split_batches": True, "even_batches": False},
    "split by a function": {"split_batches": True, "slice_fn_for_dispatch": lambda batch, part, **_: batch[part]},
    "split by a function, uneven": {
        "split_batches": True,
        "even_batches": False,
        "slice_fn_for_dispatch": lambda batch, part, **_: batch[part],
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "drop_last"),
    [
        ("map", False),
        ("map", True),
        ("stream", False),
        ("stream", True),
        pytest.param("stream, with a worker", False, marks=pytest.mark.slow),
    ],
)
def test_every_size_is_dealt_out_as_by_hand(mode: str, kind: str, drop_last: bool) -> None:
    sizes = [0, 1, 4, 7] if "worker" in kind else list(range(17))
    results = _everywhere(lambda: [_read(_loader(kind, size, 4, drop_last), **MODES[mode]) for size in sizes])
    split, even = "split" in mode, "uneven" not in mode
    for rank, per_size in enumerate(results):
        for size, (batches, length) in zip(sizes, per_size, strict=True):
            expected = by_hand(range(size), 4, 2, rank, split=split, even=even, drop_last=drop_last)
            if "worker" in kind and mode == "split by a function, uneven":
                # A process without a part in the last round may not know that the one before was its last.
                batches, expected = _without_end(batches), _without_end(expected)
            assert batches == expected, (rank, size)
            if kind == "map" and mode != "split by a function, uneven":
                assert length == len(expected)


def _without_end(batches: list[Handed]) -> list[Handed]:
    return [batch._replace(is_last=False) for batch in batches]


def test_a_shuffled_loader_has_the_order_of_one_process() -> None:
    def orders(dispatches: bool, batch_size: int) -> list[list[list[int]]]:
        loader = DataLoader(Numbers(24), batch_size=batch_size, shuffle=True)
        prepared = prepare_data_loader(loader, dispatch_batches=dispatches, data_seed=5, low_memory_shuffle=True)
        assert isinstance(prepared, DataLoaderDispatcher) == dispatches
        return [read(prepared) for _ in range(2)]

    alone = orders(False, 8)
    results = _everywhere(lambda: orders(True, 4))
    for epoch in range(2):
        assert [left + right for left, right in zip(results[0][epoch], results[1][epoch], strict=True)] == alone[epoch]
    assert _everywhere(lambda: orders(True, 2), 4)[3] == _everywhere(lambda: orders(False, 2), 4)[3]


def test_only_the_first_process_reads() -> None:
    def reads() -> int:
        dataset = Stream(20)
        read(prepare_data_loader(DataLoader(dataset, batch_size=2), dispatch_batches=True))
        return dataset.reads

    assert _everywhere(reads) == [20, 0]


class Ragged(IterableDataset[Any]):
    """Texts and tensors of different shapes."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"text": "a" * index, "values": torch.arange(index)} for index in range(5)])


def test_objects_and_unequal_shapes_travel() -> None:
    def texts() -> list[Any]:
        loader = prepare_data_loader(
            DataLoader(Ragged(), batch_size=2, collate_fn=lambda rows: rows), dispatch_batches=True
        )
        return [[(row["text"], row["values"].tolist()) for row in batch] for batch in loader]

    rows = [("a" * index, list(range(index))) for index in range(5)]
    assert _everywhere(texts) == [[rows[:2], [rows[4], rows[0]]], [rows[2:4], rows[1:3]]]


def test_batches_that_come_ready_are_dealt_out_or_cut() -> None:
    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.tensor([10 * index, 10 * index + 1]) for index in range(3)])

    loader = DataLoader(Ready(), batch_size=None)
    results = _everywhere(lambda: (_read(loader)[0], _read(loader, split_batches=True)[0]))
    assert [[handed.samples for handed in whole] for whole, _ in results] == [[[0, 1], [20, 21]], [[10, 11], [0, 1]]]
    assert [whole[-1].rows for whole, _ in results] == [None, (2, 0)]
    assert [[handed.samples for handed in cut] for _, cut in results] == [[[0], [10], [20]], [[1], [11], [21]]]
    with pytest.raises(Exception, match="has 2 rows, which do not split into 4 equal parts"):
        _everywhere(lambda: _read(loader, split_batches=True), 4)


def test_texts_of_a_ready_batch_are_cut_with_its_rows_and_single_values_stay() -> None:
    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            numbers = torch.arange(4)
            yield {"x": numbers, "text": [*"abcd"], "pair": [numbers, ("e", "f", "g", "h")], "step": torch.tensor(7),
                   "size": (1, 2, 3, 4), "names": ["x", "y"], "level": 3}  # fmt: skip

    def unchanged(batch: Any) -> Any:  # torch's own function makes lists of tuples
        return batch

    def batch() -> dict[str, Any]:
        loader = DataLoader(Ready(), batch_size=None, collate_fn=unchanged)
        (batch,) = prepare_data_loader(loader, dispatch_batches=True, split_batches=True)
        pair = [batch["pair"][0].tolist(), batch["pair"][1]]
        return {**batch, "x": batch["x"].tolist(), "pair": pair, "step": batch["step"].item()}

    same = {"step": 7, "size": (1, 2, 3, 4), "names": ["x", "y"], "level": 3}
    assert _everywhere(batch) == [
        {"x": [0, 1], "text": ["a", "b"], "pair": [[0, 1], ("e", "f")], **same},
        {"x": [2, 3], "text": ["c", "d"], "pair": [[2, 3], ("g", "h")], **same},
    ]


@pytest.mark.parametrize("kind", ["map", "stream", pytest.param("stream with workers", marks=pytest.mark.slow)])
def test_every_position_can_be_gone_on_from(kind: str) -> None:
    def run() -> None:
        def prepared() -> Any:
            workers = 2 if "workers" in kind else 0
            stream, numbers = DataLoader(Stream(20), 2, num_workers=workers), DataLoader(Numbers(20), 2, shuffle=True)
            loader = numbers if kind == "map" else stream
            return prepare_data_loader(loader, dispatch_batches=True, data_seed=5, low_memory_shuffle=True)

        loader = prepared()
        passes = [read(loader), read(loader)]
        for done in (3,) if "workers" in kind else (0, 1, 3, 4):
            saving, resumed = prepared(), prepared()
            list(islice(saving, done))
            state = json.loads(json.dumps(saving.state_dict()))
            assert (state["epoch"], state["position"]) == (0, 4 * done)
            assert PartialState().group.all_gather_objects(state) == [state] * 2
            resumed.load_state_dict(state)
            assert [read(resumed), read(resumed)] == [passes[0][done:], passes[1]]
            assert read(skip_first_batches(prepared(), done)) == passes[0][done:]

    _everywhere(run)


def test_the_remainder_is_known_everywhere() -> None:
    def remainders() -> int:
        loader = prepare_data_loader(DataLoader(Stream(9), batch_size=2), dispatch_batches=True)
        return [loader.remainder for _ in loader][-1]

    assert _everywhere(remainders) == [1, 1]


def test_a_loop_may_be_left_and_entered_again() -> None:
    def run() -> list[list[int]]:
        loader = prepare_data_loader(DataLoader(Numbers(12), batch_size=2), dispatch_batches=True)
        for _ in loader:
            break
        return read(loader)

    assert _everywhere(run) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


class Breaking(Stream):
    """A dataset that breaks."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        raise OSError("the disk is gone")


def _unsendable(samples: list[int]) -> Any:
    return lambda: samples


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [(Breaking(9), {}, "OSError: the disk is gone"), (Stream(9), {"collate_fn": _unsendable}, "local object")],
)
def test_an_error_of_the_reading_process_reaches_all(dataset: Any, options: dict[str, Any], message: str) -> None:
    def run() -> str:
        loader = prepare_data_loader(DataLoader(dataset, batch_size=2, **options), dispatch_batches=True)
        try:
            return str(list(loader))
        except (OSError, AttributeError, PicklingError, WorldError) as error:
            return f"{type(error).__name__}: {error}"

    first, second = _everywhere(run)
    assert message in first
    assert second.startswith("WorldError")
    assert message in second


def test_a_world_of_one_takes_the_same_path() -> None:
    batches, length = _read(DataLoader(Numbers(5), batch_size=2))
    assert [handed.samples for handed in batches] == [[0, 1], [2, 3], [4]]
    assert length == 3


def test_processes_that_are_not_there_are_sent_nothing() -> None:
    with pytest.raises(ConfigurationError, match="between the 1 ranks of this world, not between num_processes=2"):
        prepare_data_loader(DataLoader(Numbers(5)), num_processes=2, process_index=0, dispatch_batches=True)


@pytest.mark.parametrize("split", [False, True])
def test_a_dispatcher_made_by_hand_is_the_one_that_is_prepared(split: bool) -> None:
    def body() -> list[Any]:
        prepared = prepare_data_loader(_loader("map", 11, 4), dispatch_batches=True, split_batches=split)
        made = DataLoaderDispatcher(Numbers(11), split_batches=split, batch_size=4)
        skipping = DataLoaderDispatcher(Numbers(11), split, 1, batch_size=4, iteration=3)
        return [read(prepared), read(made), skipping.iteration, read(skipping), read(skipping)]

    for prepared, made, iteration, skipped, next_epoch in _everywhere(body):
        assert prepared == made == next_epoch
        assert (iteration, skipped) == (3, prepared[1:])


@pytest.mark.parametrize("options", [{"dispatch_batches": True}, {"split_batches": True}, {}])
def test_a_slice_function_that_is_ignored_is_told(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare_data_loader(
        _loader("map", 4, 2), slice_fn_for_dispatch=lambda batch, part, **_: batch[part], **options
    )
    assert len(list(prepared)) == 2
    assert "slice_fn_for_dispatch is ignored: no batch is cut" in caplog.text
