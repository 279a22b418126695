"""Any Python objects between processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_lib import ConfigurationError
from trainer_lib.collectives import broadcast_object_list, gather_object

Everywhere = Callable[[Callable[[int, int], Any]], list[Any]]


def test_lists_and_tuples_are_joined(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        assert gather_object([f"{rank}a", {"rank": rank}]) == [
            item for other in range(size) for item in (f"{other}a", {"rank": other})
        ]
        assert gather_object((rank,)) == list(range(size))
        assert gather_object([rank] if rank == 0 else []) == [0]

    everywhere(body)


def test_anything_else_counts_as_one(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        assert gather_object("text") == ["text"] * size
        assert gather_object({"rank": rank}) == [{"rank": other} for other in range(size)]
        assert gather_object(None) == [None] * size

    everywhere(body)


def test_tensors_inside_objects_need_no_equal_shapes(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        boxes = gather_object([{"boxes": torch.full((rank, 4), float(rank))}])
        assert [row["boxes"].tolist() for row in boxes] == [[[float(other)] * 4] * other for other in range(size)]

    everywhere(body)


def test_broadcast_overwrites_the_list_whatever_its_length(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        values: list[Any] = ["run", rank, None][: 1 + rank]
        assert broadcast_object_list(values, from_process=size - 1) is values
        assert values == ["run", size - 1, None][:size]

    everywhere(body)


def test_broadcast_leaves_the_sender_its_objects() -> None:
    objects = [object()]
    assert broadcast_object_list(objects)[0] is objects[0]


def test_broadcast_refuses_what_is_no_list_and_nobody() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a list \(got a str\). Pass \[value\]"):
        broadcast_object_list("run-7")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="Rank 1 does not exist in a world of 1"):
        broadcast_object_list([1], from_process=1)
