"""Debug mode: what disagrees is told on every process, before anything hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.worlds import run_world
from trainer_lib import DistributedOperationException
from trainer_lib.collectives import broadcast, gather, pad_across_processes, reduce
from trainer_lib.collectives.shape_check import chained_operation, check_layouts, layout, verify_operation
from trainer_lib.state import PartialState

OPERATIONS: list[Callable[[Any], Any]] = [gather, reduce, broadcast, pad_across_processes]

SHAPES = "rank 0: ['logits']: float32 [2, 3]\n  rank 1: ['logits']: float32 [2, 4]\n"
STRUCTURES = "rank 0: ['logits']: float32 [2]; nothing\n  rank 1: ['logits']: float32 [2, 1]; ['loss']: int64 []\n"


def _told(inputs: list[Any], operations: list[Callable[[Any], Any]], **variables: str) -> list[list[str]]:
    def body() -> list[str]:
        state = PartialState()
        messages: list[str] = []
        for operation in operations:
            with pytest.raises(DistributedOperationException) as caught:
                operation(inputs[state.process_index])
            messages.append(str(caught.value))
            state.wait_for_everyone()
        return messages

    return run_world(body, num_processes=len(inputs), timeout=60, **variables)


def test_different_shapes() -> None:
    inputs = [{"same": torch.ones(1), "logits": torch.ones(2, 3 + rank)} for rank in range(2)]
    first, second = _told(inputs, OPERATIONS[:3], ACCELERATE_DEBUG_MODE="1")
    assert first == second
    for name, message in zip(("gather", "reduce", "broadcast"), first, strict=True):
        assert message.startswith(f"{name} needs the same structure, shapes and types on all ranks, and got\n")
        assert SHAPES in message, "and nothing of what agrees"
    assert first[0].endswith("Where only the number of rows differs, use gather_for_metrics.")


def test_different_structures() -> None:
    inputs = [{"logits": torch.ones(2)}, {"logits": torch.ones(2, 1), "loss": torch.tensor(1)}]
    first, second = _told(inputs, OPERATIONS, ACCELERATE_DEBUG_MODE="1")
    assert first == second
    for message in first:
        assert STRUCTURES in message


def test_order_of_keys_and_types_count() -> None:
    left, other = torch.ones(1), torch.ones(1).bool()
    (first, _) = _told([{"a": left, "b": left}, {"b": left, "a": left}], OPERATIONS, ACCELERATE_DEBUG_MODE="1")
    assert all("rank 0: ['a']: float32 [1]; ['b']: float32 [1]\n" in message for message in first)
    (first, _) = _told([left, other], OPERATIONS, ACCELERATE_DEBUG_MODE="1")
    assert all("rank 1: the value: bool [1]\n" in message for message in first)


def test_what_agrees_passes_and_is_looked_at_only_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def body() -> int:
        state = PartialState()
        exchange = state.group.all_gather_objects
        monkeypatch.setattr(state.group, "all_gather_objects", lambda value: asked.append(value) or exchange(value))
        for operation in (gather, reduce, broadcast):
            operation({"a": torch.ones(2), "b": [torch.tensor(1)]})
        return len(asked)

    assert run_world(body, timeout=60, ACCELERATE_DEBUG_MODE="1") == [3, 3]
    assert run_world(body, timeout=60) == [0, 0]


def test_processes_of_one_mind_are_told_together_and_long_lists_are_cut() -> None:
    many = {str(key): torch.ones(2) for key in range(9)}
    fewer = {str(key): torch.ones(1) for key in range(9)}
    with pytest.raises(DistributedOperationException) as caught:
        check_layouts("gather", [layout(many), layout(fewer), layout(many)])
    assert "\n  ranks 0, 2: ['0']: float32 [2]; " in str(caught.value)
    assert "['4']: float32 [2]; and 4 more\n  rank 1: " in str(caught.value)


@verify_operation
def my_reduce(tensor: Any) -> Any:
    return tensor


@chained_operation
def my_metric(tensor: Any) -> Any:
    return gather(tensor)


def test_a_collective_of_your_own_is_checked() -> None:
    first, second = _told([torch.ones(1), torch.ones(2)], [my_reduce, my_metric], ACCELERATE_DEBUG_MODE="1")
    assert first == second
    assert first[0].startswith("my_reduce needs the same structure")
    assert first[1].startswith("A collective in my_metric failed: gather needs the same structure")
    assert my_reduce(tensor=3) == 3
