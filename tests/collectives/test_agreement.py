"""An error of one rank is raised on all ranks, with its class, its rank and its text."""

import pytest

from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.collectives.agreement import check_same_on_all_ranks, raise_on_all_ranks, run_on_main_process
from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    DistributedOperationException,
    TrainerLibError,
    WorldError,
)


def raise_if(condition: bool, error: Exception) -> None:
    if condition:
        raise error


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def test_an_error_of_one_rank_is_raised_on_all_ranks() -> None:
    def body() -> list[str]:
        group, messages = PartialState(cpu=True).group, list[str]()
        for raised in (KeyError("colour"), ConfigurationError("max_steps must be at least 1 (got 0).")):
            with pytest.raises((KeyError, TrainerLibError)) as caught, raise_on_all_ranks(group, "fit"):
                raise_if(group.rank == 1, raised)
            messages.append(message(caught.value))
        return messages

    first, second = run_world(body, num_processes=2, timeout=60)
    assert second == ["KeyError: 'colour'", "ConfigurationError: max_steps must be at least 1 (got 0)."]
    assert first == [
        "WorldError: fit failed on rank 1: KeyError: 'colour'",
        "ConfigurationError: fit failed on rank 1: max_steps must be at least 1 (got 0).",
    ]


def test_the_caller_chooses_what_the_other_ranks_raise() -> None:
    def body() -> str:
        group = PartialState(cpu=True).group
        expected = pytest.raises((KeyError, CheckpointError))
        with expected as caught, raise_on_all_ranks(group, "save_state", CheckpointError):
            raise_if(group.rank == 0, KeyError("weight"))
        return message(caught.value)

    assert run_world(body, num_processes=2, timeout=60)[1] == (
        "CheckpointError: save_state failed on rank 0: KeyError: 'weight'"
    )


def test_the_result_of_the_main_process_is_returned_on_all_ranks() -> None:
    def body() -> tuple[int, str]:
        group, calls = PartialState(cpu=True).group, list[int]()

        def value() -> int:
            calls.append(group.rank)
            return 3

        result = run_on_main_process(group, "fit", value)
        assert calls == ([0] if group.rank == 0 else [])
        with pytest.raises((ZeroDivisionError, WorldError)) as caught:
            run_on_main_process(group, "fit", lambda: 1 / 0)
        return result, message(caught.value)

    first, second = run_world(body, num_processes=2, timeout=60)
    assert first == (3, "ZeroDivisionError: division by zero")
    assert second == (3, "WorldError: fit failed on rank 0: ZeroDivisionError: division by zero")


def test_facts_that_differ_are_named_with_their_value_on_each_rank() -> None:
    def body() -> str:
        group = PartialState(cpu=True).group
        check_same_on_all_ranks(group, {"seed": 7})
        with pytest.raises(DistributedOperationException) as caught:
            check_same_on_all_ranks(group, {"seed": 7, "max_steps": 3 + group.rank})
        return str(caught.value)

    for text in run_world(body, num_processes=2, timeout=60):
        assert "\n  max_steps: 3 on rank 0, 4 on rank 1\n" in text
        assert "seed" not in text
