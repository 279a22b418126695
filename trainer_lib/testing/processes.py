"""Run a function on several processes in a test, and reset the state between tests."""

from collections.abc import Callable
from typing import Any

from trainer_lib.launchers.fork import run_forked
from trainer_lib.launchers.forked_process import reset_states as reset_states


def run_processes(function: Callable[..., Any], num_processes: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(*args)` on CPU processes with a real process group, and return the value of each.

    Example:
        >>> def count():
        ...     from trainer_lib import PartialState
        ...
        ...     return PartialState().num_processes
        >>> run_processes(count, 2)
        [2, 2]
    """
    return run_forked(function, args, num_processes, timeout=timeout)
