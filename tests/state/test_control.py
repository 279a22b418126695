"""Rank gates, ordering, and sharing inputs out."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

from tests.worlds import run_world
from trainer_lib import ConfigurationError
from trainer_lib.state import PartialState, do_nothing
from trainer_lib.state.partial_state import wait_for_everyone

Everywhere = Callable[[Callable[[int, int], Any]], list[Any]]


def two_machines(state_of: Callable[[], Any]) -> Callable[[], Any]:
    """Run on four processes as if two of them were on another machine."""

    def body() -> Any:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return state_of()

    return body


def test_places(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        state = PartialState()
        assert state.use_distributed == (size > 1)
        assert state.is_main_process == state.is_local_main_process == (rank == 0)
        assert state.is_last_process == (rank == size - 1)

    everywhere(body)


def test_decorators_let_through_who_is_meant() -> None:
    def body() -> list[Any]:
        state = PartialState()

        @state.on_main_process
        def main(value: int, *, more: int = 0) -> int:
            """Do it."""
            return value + more

        @state.on_last_process
        def last() -> str:
            return "last"

        @state.on_local_main_process()
        def local_main() -> str:
            return "local main"

        @state.on_process(process_index=2)
        def second() -> str:
            return "2"

        @state.on_local_process(local_process_index=1)
        def local_one() -> str:
            return "local 1"

        local_zero = state.on_local_process(lambda: "local 0", local_process_idx=0)
        assert (main.__name__, main.__doc__) == ("main", "Do it.")
        return [main(1, more=2), last(), local_main(), second(), local_one(), local_zero()]

    assert run_world(two_machines(body), num_processes=4, timeout=60) == [
        [3, None, "local main", None, None, "local 0"],
        [None, None, None, None, "local 1", None],
        [None, None, "local main", "2", None, "local 0"],
        [None, "last", None, None, "local 1", None],
    ]


def test_a_decorator_needs_to_know_which_process() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"process_index is missing. Pass the rank that runs the function, such as process_index=0",
    ):
        PartialState(cpu=True).on_process(print)
    with pytest.raises(
        ConfigurationError, match=r"local_process_index is missing\. Pass the rank that runs the function"
    ):
        PartialState(cpu=True).on_local_process(print)


@pytest.mark.parametrize("scope", ["main_process_first", "local_main_process_first"])
def test_the_main_process_goes_first(scope: str, tmp_path: Path) -> None:
    def body() -> None:
        state = PartialState()
        first: Callable[[], AbstractContextManager[None]] = getattr(state, scope)
        mine = state.is_main_process if scope == "main_process_first" else state.is_local_main_process
        machine = "all" if scope == "main_process_first" else state.process_index // 2
        for turn in range(5):
            done = tmp_path / f"{turn} {machine}"
            with first():
                # Made here and nowhere else, so it is there for the others only if they came after.
                assert done.exists() != mine
                if mine:
                    done.touch()
            state.wait_for_everyone()

    run_world(two_machines(body), num_processes=4, timeout=60)


def test_print_is_once_a_machine(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        state = PartialState()
        state.print(f"process {state.process_index}", flush=True)

    run_world(two_machines(body), num_processes=4, timeout=60)
    assert sorted(capfd.readouterr().out.splitlines()) == ["process 0", "process 2"]


def test_wait_for_everyone_waits(tmp_path: Path) -> None:
    def body() -> None:
        state = PartialState()
        for turn in range(5):
            (tmp_path / f"{turn} {state.process_index}").touch()
            wait_for_everyone()
            assert len(list(tmp_path.glob(f"{turn} *"))) == 4

    run_world(body, num_processes=4, timeout=60)


def part(inputs: Any, apply_padding: bool = False) -> Any:
    with PartialState().split_between_processes(inputs, apply_padding=apply_padding) as share:
        return share


def parts(inputs: Any, apply_padding: bool = False, num_processes: int = 2) -> list[Any]:
    return run_world(part, (inputs, apply_padding), num_processes, timeout=60)


def test_a_single_rank_gets_the_inputs_themselves() -> None:
    inputs = {"prompts", "that", "have", "no", "order"}
    assert part(inputs) is inputs


def test_inputs_are_shared_out_in_order() -> None:
    assert parts([1, 2, 3, 4, 5], num_processes=4) == [[1, 2], [3], [4], [5]]
    assert parts((1, 2, 3)) == [(1, 2), (3,)]
    assert parts(["a"]) == [["a"], []]
    assert parts([]) == [[], []]


def test_a_string_is_one_input() -> None:
    assert parts("a dog") == ["a dog", "a dog"]
    assert parts("", True) == ["", ""]


def test_padding_repeats_the_last_input() -> None:
    assert parts([1, 2, 3, 4, 5], True, num_processes=4) == [[1, 2], [3, 5], [4, 5], [5, 5]]
    assert parts([1, 2, 3, 4], True) == [[1, 2], [3, 4]]
    assert parts(["a"], True) == [["a"], ["a"]]
    assert parts([], True) == [[], []]


def test_tensors_and_arrays_stay_what_they_are() -> None:
    first, second = parts(torch.tensor([[1, 1], [2, 2], [3, 3]]))
    assert (first.tolist(), second.tolist()) == ([[1, 1], [2, 2]], [[3, 3]])
    first, second = parts(torch.tensor([[1, 1]]))
    assert (first.tolist(), second.shape) == ([[1, 1]], (0, 2))
    first, second = parts(torch.tensor([1, 2, 3]), True)
    assert second.tolist() == [3, 3]
    first, second = parts(np.array([1.5, 2.5, 3.5]), True)
    assert isinstance(second, np.ndarray)
    assert second.tolist() == [3.5, 3.5]


def test_a_dict_is_shared_out_value_by_value() -> None:
    first, second = parts({"id": [1, 2, 3], "mask": torch.tensor([True, False, True])})
    assert (first["id"], first["mask"].tolist()) == ([1, 2], [True, False])
    assert (second["id"], second["mask"].tolist()) == ([3], [True])


def test_a_dict_in_a_dict_is_shared_out_and_a_string_in_it_stays_whole() -> None:
    first, second = parts({"style": "oil", "of": {"id": [1, 2, 3], "more": {"text": ["a", "b", "c"]}}})
    assert first == {"style": "oil", "of": {"id": [1, 2], "more": {"text": ["a", "b"]}}}
    assert second == {"style": "oil", "of": {"id": [3], "more": {"text": ["c"]}}}
    assert parts({"style": "oil"}) == [{"style": "oil"}, {"style": "oil"}]
    with pytest.raises(ConfigurationError, match=r"got \{'a': 1, 'b.c': 2\}"):
        part({"a": [1], "b": {"c": [1, 2]}})


def test_rows_of_a_table_are_shared_out_by_position() -> None:
    table = pd.DataFrame({"id": [1, 2, 3]}, index=[2, 1, 0])
    first, second = parts(table)
    assert (first["id"].tolist(), second["id"].tolist()) == ([1, 2], [3])
    first, second = parts(table["id"], True)
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 3])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (iter([1, 2]), "cannot split inputs"),
        (None, "cannot split inputs .got None."),
        (torch.tensor(1), "cannot split inputs"),
        ({"prompts": ["a", "b"], "scale": 7.5}, r"cannot split scale .got 7.5.*no items in a fixed order"),
    ],
)
def test_inputs_without_items_are_refused_on_one_process_too(inputs: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        part(inputs)


def test_a_set_is_not_shared_out_since_its_order_may_differ_between_ranks() -> None:
    def body() -> None:
        with pytest.raises(ConfigurationError, match=r"no items in a fixed order. Give a list"):
            part({"a", "b", "c"})

    run_world(body, timeout=60)


def test_a_dataset_is_shared_out_by_select() -> None:
    def body() -> list[int]:
        share = part(Dataset.from_dict({"id": [1, 2, 3]}), True)
        assert isinstance(share, Dataset)
        return share["id"][:]

    assert run_world(body, timeout=60) == [[1, 2], [3, 3]]


def test_values_of_different_lengths_are_refused_on_one_process_too() -> None:
    with pytest.raises(ConfigurationError, match=r"values of one length .got \{'a': 1, 'b': 2\}"):
        part({"a": [1], "b": [1, 2]})


def test_one_process_gets_everything() -> None:
    inputs = [1, 2, 3]
    assert part(inputs) == inputs
    assert part({}) == {}


def test_nothing_is_done() -> None:
    assert do_nothing(1, a=2) is None  # type: ignore[func-returns-value]
