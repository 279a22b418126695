"""Rows of which the processes have different numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tests.collectives.trees import Batch, Point, nested
from tests.worlds import run_world
from trainer_lib import DistributedOperationException
from trainer_lib.collectives import gather, gather_rows
from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.state import PartialState

Everywhere = Callable[[Callable[[int, int], Any]], list[Any]]


def test_each_process_may_have_another_number_of_rows(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        expected = [[float(other)] * 3 for other in range(size) for _ in range(other)]
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.int8):
            gathered = gather_rows(torch.full((rank, 3), rank).to(dtype))  # none on the first
            assert gathered.dtype is dtype
            assert gathered.tolist() == torch.tensor(expected).reshape(-1, 3).to(dtype).tolist()

    everywhere(body)


def test_scalars_count_as_one_row(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        assert gather_rows(torch.tensor(rank)).tolist() == list(range(size))

    everywhere(body)


def test_who_has_no_rows_need_not_know_their_shape_and_type(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        gathered = gather_rows(torch.tensor([[rank, rank]]) if rank == size - 1 else torch.tensor([]))
        assert gathered.dtype is torch.int64
        assert gathered.tolist() == [[size - 1, size - 1]]

    everywhere(body)


def test_rows_in_every_container(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        gathered = gather_rows(nested(float(rank), rows=size - rank))
        expected = [float(other) for other in range(size) for _ in range(size - other)]
        assert [tensor.reshape(len(expected), -1)[:, 0].tolist() for tensor in tensors(gathered)] == [expected] * 9
        assert isinstance(gathered["point"], Point)
        assert isinstance(gathered["batch"], Batch)
        assert isinstance(gathered["encoding"], BatchEncoding)

    everywhere(body)


def test_lists_beside_tensors_are_joined(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        ranks = list(range(size))
        batch = {
            "ids": torch.tensor([rank]),
            "texts": [f"#{rank}"],
            "answers": [{"text": f"#{rank}", "start": [rank]}],
            "names": (f"#{rank}", "x"),
            "array": np.full((1, 2), rank),
            "source": f"file {rank}",
            "missing": None,
            "parts": [torch.tensor([rank]), (f"#{rank}",)],
        }
        gathered = gather_rows(batch)
        assert gathered.pop("ids").tolist() == ranks
        assert gathered.pop("array").tolist() == [[other, other] for other in ranks]
        parts = gathered.pop("parts")
        assert parts[0].tolist() == ranks
        assert parts[1] == tuple(f"#{other}" for other in ranks)
        assert gathered == {
            "texts": [f"#{other}" for other in ranks],
            "answers": [{"text": f"#{other}", "start": [other]} for other in ranks],
            "names": tuple(name for other in ranks for name in (f"#{other}", "x")),
            "source": [f"file {other}" for other in ranks],
            "missing": None,
        }

    everywhere(body)


def test_a_tuple_of_lists_holds_columns(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        predictions, references = gather_rows(([f"p{rank}"], [f"r{rank}"]))
        assert predictions == [f"p{other}" for other in range(size)]
        assert references == [f"r{other}" for other in range(size)]

    everywhere(body)


def test_empty_lists_and_arrays_on_some(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        last = rank == size - 1
        assert gather_rows(["a"] if last else []) == ["a"]
        assert gather_rows(np.ones((1, 2)) if last else np.ones(0)).tolist() == [[1, 1]]
        assert gather_rows([]) == []

    everywhere(body)


def test_nobody_has_rows(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        assert gather_rows(torch.ones(0, 3)).shape == (0, 3)

    everywhere(body)


class Table(dict[str, torch.Tensor]):
    """Columns of one row."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if len(value) > 1:
            raise RuntimeError("another number of rows")
        super().__setitem__(key, value)


def test_a_container_that_refuses_more_rows_is_an_error_with_the_way_out() -> None:
    def body() -> list[int]:
        table = Table(ids=torch.tensor([PartialState().process_index]))
        for operation in (gather, gather_rows):
            with pytest.raises(TypeError, match=r"A Table refuses .* \(another number of rows\)\. Pass a dict of them"):
                operation(table)
        return gather_rows(dict(table))["ids"].tolist()

    assert run_world(body, num_processes=2) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (torch.ones(1, 2), torch.ones(1, 3), "rank 0: the value: float32 [1, 2]\n  rank 1: the value: float32 [1, 3]"),
        (torch.ones(1), torch.ones(1).long(), "rank 0: the value: float32 [1]\n  rank 1: the value: int64 [1]"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "rank 0: ['a']: float32 [1]\n  rank 1: ['b']: float32 [1]"),
        ([torch.ones(1)], [], "rank 0: [0]: float32 [1]\n  rank 1: the value: rows"),
    ],
)
def test_what_does_not_fit_is_told_on_all_processes_in_debug_mode_or_not(first: Any, second: Any, text: str) -> None:
    def body() -> str:
        with pytest.raises(DistributedOperationException) as caught:
            gather_rows((first, second)[PartialState().process_index])
        PartialState().wait_for_everyone()
        return str(caught.value)

    for message in run_world(body, timeout=60):
        assert text in message
        assert message.startswith("gather_for_metrics needs the same")
        assert "Pad the others first: pad_across_processes(…, dim=1)." in message
        assert message.endswith("gathered by gather_for_metrics(…, use_gather_object=True).")
