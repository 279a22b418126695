"""Processes that end with the process that started them, however that one ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_BETWEEN_LOOKS = 0.5  # seconds


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Args:
        parent: The process that started this one.
        number: The signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), number)


def die_with_starter(by_main_thread: bool) -> None:
    """Kill this process, made by `multiprocessing`, when the one that made it dies.

    Args:
        by_main_thread: Whether the main thread made it: the kernel looks after the thread, which may end earlier.
    """
    started_by = multiprocessing.parent_process()
    if started_by is None or started_by.pid is None:
        return
    if os.getppid() == started_by.pid:
        if by_main_thread:
            die_with_parent(started_by.pid, signal.SIGKILL)
    elif not _exists(started_by.pid):  # a fork server is between them otherwise
        os.kill(os.getpid(), signal.SIGKILL)
    if not by_main_thread or sys.platform != "linux" or os.getppid() != started_by.pid:
        threading.Thread(target=_watch, args=(os.getppid(), started_by.pid), name="parent", daemon=True).start()


def _watch(parent: int, started_by: int) -> None:
    while os.getppid() == parent and _exists(started_by):
        time.sleep(_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)


def _exists(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False
