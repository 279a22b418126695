"""This file is running a part of a test on several processes, and starting the next test afresh."""

from collections.abc import Callable
from typing import Any

from trainer_lib.launchers.fork import run_forked
from trainer_lib.launchers.forked_process import reset_states as reset_states


def run_processes(function: Callable[..., Any], num_processes: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(*args)` on CPU processes that form a real world, and return what each of them returned.

    Example:
        >>> def count():
        ...     from trainer_lib import PartialState
        ...
        ...     return PartialState().num_processes
        >>> run_processes(count, 2)
        [2, 2]
    """
    return run_forked(function, args, num_processes, timeout=timeout)
