"""Functions that are called where a block of code takes too long."""

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

_PATIENCE = 1.0  # seconds


class Deadlines:
    """Calls functions of blocks that take too long, on one thread for all of them.

    Most blocks end long before, and starting a thread for each would take longer than the block. This thread sleeps
    until the deadline that it knows; blocks that begin and end in the meantime do not wake it. It ends when it wakes up
    and there is no block. While it calls one function, others wait. One object serves a process, as long as that lives.

    Example:
        >>> deadlines = Deadlines()
        >>> with deadlines.call_after(60, lambda: print("This takes a while.")):
        ...     total = sum(range(10))
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # a forked process has no thread, and locks as they were
            os.register_at_fork(after_in_child=self._reset)

    @contextmanager
    def call_after(self, seconds: float, function: Callable[[], object]) -> Generator[None]:
        """Call `function` once, on the thread, if the block takes longer than this."""
        block, deadline = object(), time.monotonic() + seconds
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                thread.start()  # it waits for the lock
                self._thread, self._wakes_at = thread, deadline
            elif deadline < self._wakes_at:
                self._wake.set()
            self._blocks[block] = deadline, function
        try:
            yield
        finally:
            with self._lock:
                self._blocks.pop(block, None)

    def end_thread(self) -> None:
        """End the thread, unless a block needs it; the next block starts another one."""
        with self._lock:
            thread = None if self._blocks else self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join(_PATIENCE)  # a block may have begun in the meantime

    def _watch(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                late = [block for block, (deadline, _) in self._blocks.items() if deadline <= now]
                functions = [self._blocks.pop(block)[1] for block in late]
                if not functions and not self._blocks:
                    self._thread = None
                    return
                self._wakes_at = min((deadline for deadline, _ in self._blocks.values()), default=now)
            for function in functions:
                try:
                    function()
                except BaseException as error:  # noqa: BLE001 - other blocks still need the thread
                    _report(error)
            self._wake.wait(max(0.0, self._wakes_at - time.monotonic()))
            self._wake.clear()

    def _reset(self) -> None:
        self._blocks: dict[object, tuple[float, Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()


def _report(error: BaseException) -> None:
    """Show an error as Python shows those that end a thread."""
    with suppress(Exception):
        details = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(details))
