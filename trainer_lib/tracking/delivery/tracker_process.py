"""This file is the process that a tracker lives in if it talks to a network: it is told what to do, and answers.

It knows nothing of torch and of the training's other processes. It ends when the training does.
"""

import importlib
import os
import sys
import threading
import time
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

from trainer_lib.tracking.delivery.entries import Entry, HandOver, told

_GRACE = 10.0


def main(descriptor: int) -> None:
    """Serve until the other end is closed."""
    connection = Connection(descriptor)
    parent = os.getppid()
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    served = _Served()
    while True:
        try:
            while not connection.poll(1.0):
                if os.getppid() != parent:  # those it forked may still hold the other end
                    raise EOFError
            request = connection.recv()
        except (EOFError, OSError):
            break
        complaint = None
        try:
            served.do(*request)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other side is told
            complaint = told(error)
        connection.send((served.done, complaint))
        if request[0] == "finish":
            _end(0)
    _leave(served)


class _Served:
    """The tracker."""

    def __init__(self) -> None:
        self._class: Any = None
        self.tracker: Any = None
        self._calls: HandOver | None = None

    @property
    def done(self) -> int:
        """How many entries of the last delivery are through."""
        return 0 if self._calls is None else self._calls.done

    def do(self, request: str, *details: Any) -> None:
        """Do what is asked for."""
        getattr(self, f"_{request}")(*details)

    def _import(self, module: str, name: str) -> None:
        self._class = reduce(getattr, name.split("."), importlib.import_module(module))
        if self._class.module:
            importlib.import_module(self._class.module)

    def _start(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        tracker = self._class(*arguments, **options)
        tracker.start()
        self.tracker = tracker

    def _deliver(self, entries: list[Any]) -> None:
        self._calls = HandOver(self.tracker, [Entry(*entry) for entry in entries])
        self._calls.make()

    def _finish(self, outcome: str) -> None:
        self.tracker.outcome = outcome
        self.tracker.finish()


def _end_after(parent: int) -> None:
    """End some time after the parent, whatever the tracker waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_GRACE)
    _end(1)


def _leave(served: _Served) -> None:
    """End in an orderly way what was left without a word, within a time."""
    threading.Timer(_GRACE, _end, [1]).start()
    if served.tracker is not None:
        served.tracker.abort()
    _end(0)


def _end(code: int) -> None:
    # At once: packages leave threads and exit hooks that wait for a network.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
