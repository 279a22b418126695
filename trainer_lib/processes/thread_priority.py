"""The priority of a thread beside that of training."""

import os
import sys
import threading
from contextlib import suppress

_LOWEST = 19


def yield_cores() -> None:
    """Let all other threads go first where cores are busy: this one, and those that it starts, get what is left.

    Elsewhere than on Linux a priority is that of a whole process, and nothing happens.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
