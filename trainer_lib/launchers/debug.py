"""`debug_launcher`: run a training function on a few CPU processes, to test it."""

from collections.abc import Callable, Sequence
from typing import Any

from trainer_lib.launchers.fork import run_forked
from trainer_lib.launchers.process_failures import ProcessFailedError
from trainer_lib.processes.exit_codes import reason_of
from trainer_lib.state.partial_state import PartialState


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run `function(*args)` on CPU processes that form a real world, and return the results in order of rank.

    Raises:
        ProcessFailedError: If a process raised or died; the message holds its traceback.
        SystemExit: If a signal or a deadline ended all processes early; with their exit code.

    Example:
        >>> def count():
        ...     from trainer_lib import PartialState
        ...
        ...     return PartialState().num_processes
        >>> debug_launcher(count, num_processes=2)
        [2, 2]
    """
    try:
        return run_forked(function, args, num_processes)
    except ProcessFailedError as error:
        if reason_of(error.exit_code) is None:
            raise
        raise SystemExit(error.exit_code) from error


def test_launch() -> None:
    """Raise unless this process can form the world that its launcher describes."""
    PartialState()
