"""This file is a loader's workers as a group of processes apart: signals to the training do not take its data away.

Ctrl-C in a terminal, `timeout` and `kill -- -GROUP` reach all processes of a group. The one that trains ends after its
step, for which it needs its workers; it ends them itself, as they end by themselves when it dies.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any


class Apart:
    """What a worker does first: it leaves the group of the process that started it.

    Args:
        then: The user's `worker_init_fn`, which comes next.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Do so in the worker of this number."""
        if hasattr(os, "setpgid"):
            with contextlib.suppress(PermissionError):  # the leader of a session stays one
                os.setpgid(0, 0)
        if self.then is not None:
            self.then(worker)
