"""Processes that die when their parent dies, however it ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_POLL_INTERVAL = 0.5  # seconds


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Args:
        parent: The process that started this one.
        number: The signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), number)


def die_with_starter(by_main_thread: bool) -> None:
    """Kill this process, which `multiprocessing` started, when the process that started it dies.

    Args:
        by_main_thread: Whether the main thread started it. The kernel watches a thread, and another may end earlier.
    """
    starter = multiprocessing.parent_process()
    if starter is None or starter.pid is None:
        return
    is_child = is_child_of_starter()
    if is_child:
        if by_main_thread:
            die_with_parent(starter.pid, signal.SIGKILL)
    elif not _exists(starter.pid):  # if it exists, a fork server is the parent
        os.kill(os.getpid(), signal.SIGKILL)
    if not by_main_thread or sys.platform != "linux" or not is_child:
        threading.Thread(target=_watch, args=(os.getppid(), starter.pid), name="parent", daemon=True).start()


def is_child_of_starter() -> bool:
    """Whether the parent of this process started it; a process of Python's fork server is a child of the server."""
    starter = multiprocessing.parent_process()
    return starter is not None and os.getppid() == starter.pid


def _watch(parent: int, starter: int) -> None:
    while os.getppid() == parent and _exists(starter):
        time.sleep(_POLL_INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)


def _exists(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False
