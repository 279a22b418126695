"""What is left of the process groups of processes that have ended."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress


def kill_leftovers(leaders: Iterable[int]) -> None:
    """Kill what ended processes started and left running.

    Args:
        leaders: The process ids; each of these processes led a group of its own.
    """
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
