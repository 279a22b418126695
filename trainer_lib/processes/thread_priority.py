"""The priority of a thread beside that of training."""

import os
import sys
import threading
from contextlib import suppress

# A tenth of a core that training keeps busy. The lowest priority, 19, would get 1.5 %, and a thread that waits for
# a core while it holds the GIL stops training.
_NICE = 10


def yield_cores() -> None:
    """Leave cores that are busy to other threads: this one, and those that it starts, get a tenth of one.

    Elsewhere than on Linux a priority is that of a whole process, and nothing happens.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
