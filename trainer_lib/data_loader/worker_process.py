"""The start of a data worker: it leaves the process group of the training process, and dies with it.

Ctrl-C in a terminal, `timeout` and `kill -- -GROUP` reach all processes of a group. The training process ends after
its step, for which it needs its workers. It ends them itself, and the kernel ends them if it cannot.
"""

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_lib.processes.parent_death import die_with_starter, is_child_of_starter

STACKS_SIGNAL: int = getattr(signal, "SIGUSR2", 0)
_STACKS = "trainer_lib-stacks"  # a file in memory, which disappears with its worker


def make_ready(context: Any) -> None:
    """Make this process ready for workers that are not forked from it.

    Args:
        context: The multiprocessing context of the loader; `None` is Python's default one.
    """
    from trainer_lib.data_loader.readers import worker_tensors
    from trainer_lib.processes.fork_server import preload

    worker_tensors.send_generators_as_bytes()
    preload(["torch", worker_tensors.__name__], context)


class WorkerInit:
    """The `worker_init_fn` of a prepared loader.

    Args:
        then: The user's `worker_init_fn`, called next.
    """

    by_main_thread = True  # whether the main thread starts the workers

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def note_thread(self) -> None:
        """Record that this thread starts the next workers."""
        self.by_main_thread: bool = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        """Set up the worker of this number."""
        die_with_starter(self.by_main_thread)
        if hasattr(os, "setpgid"):
            with contextlib.suppress(PermissionError):  # the leader of a session stays one
                os.setpgid(0, 0)
        _write_stacks_when_asked()
        # Elsewhere, no signal ends the wait for the rest of a killed worker's message.
        if self.by_main_thread and is_child_of_starter():
            from trainer_lib.data_loader.readers.worker_tensors import send_small_tensors_as_bytes

            send_small_tensors_as_bytes()
        if self.then is not None:
            self.then(worker)


def worker_stacks(pid: int) -> str | None:
    """Return the stacks that a data worker has written so far; `None` if they cannot be read."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if _STACKS in str(descriptor.readlink()):
                return descriptor.read_text()
    return None


def _write_stacks_when_asked() -> None:
    if hasattr(os, "memfd_create"):  # on Linux
        faulthandler.register(STACKS_SIGNAL, os.memfd_create(_STACKS), all_threads=True)
