"""Signals as messages: a launcher reads them where it waits for its processes."""

import contextlib
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Any, Self

FORWARDED = tuple(
    name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


class SignalInbox:
    """Collects the signals that end a launch, until the context ends; the end of a child process ends a wait too.

    Ignored signals stay ignored. Outside the main thread it collects none, since Python handles signals there.
    """

    def __init__(self) -> None:
        self._signals: deque[int] = deque()
        self._reader, self._writer = socket.socketpair()
        self._events = select.poll()  # not `select`, which takes descriptors below 1024 alone
        self._events.register(self._reader, select.POLLIN)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Install the handlers."""
        for end in (self._reader, self._writer):
            end.setblocking(False)
            self._stack.enter_context(end)
        if threading.current_thread() is threading.main_thread():
            self._stack.enter_context(restored_handlers())
            before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._stack.callback(signal.set_wakeup_fd, before)
            for name in FORWARDED:
                if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
                    signal.signal(getattr(signal, name), self._receive)
            signal.signal(signal.SIGCHLD, _wake)
        return self

    def wait(self, seconds: float) -> None:
        """Wait for a signal or the end of a child, for at most some seconds."""
        if self._events.poll(seconds * 1000):
            self._reader.recv(4096)

    def take(self) -> int | None:
        """Return the next signal, or `None`."""
        return self._signals.popleft() if self._signals else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """Restore the handlers."""
        self._stack.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals.append(number)


@contextlib.contextmanager
def restored_handlers() -> Generator[dict[str, Any]]:
    """Yield the handlers of the signals that end a launch, and restore them afterwards."""
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in (*FORWARDED, "SIGCHLD")}
    try:
        yield {name: handlers[name] for name in FORWARDED}
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in handlers.items():
                if handler is not None:  # None: a handler from C code, which Python cannot restore
                    signal.signal(getattr(signal, name), handler)


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal itself wakes the wait."""
