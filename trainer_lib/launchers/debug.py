"""This file is `debug_launcher`: a training function on a few CPU processes, to see that it works there."""

from collections.abc import Callable, Sequence
from typing import Any

from trainer_lib.launchers.fork import run_forked


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run `function(*args)` on CPU processes that form a real world, and return what each of them returned.

    Example:
        >>> def count():
        ...     from trainer_lib import PartialState
        ...
        ...     return PartialState().num_processes
        >>> debug_launcher(count, num_processes=2)
        [2, 2]
    """
    return run_forked(function, args, num_processes)
