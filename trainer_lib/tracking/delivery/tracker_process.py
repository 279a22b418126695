"""The process of a tracker that uses the network: it receives requests over a pipe, and answers each.

It does not import torch, and does not know the training's ranks. It ends when the training ends.
"""

import importlib
import os
import sys
import threading
import time
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

from trainer_lib.tracking.delivery.entries import Entry, EntryCalls, describe_error

_GRACE = 10.0


def main(descriptor: int) -> None:
    """Serve requests until the other end closes the pipe."""
    connection = Connection(descriptor)
    parent = os.getppid()
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    server = _TrackerServer()
    while True:
        try:
            while not connection.poll(1.0):
                if os.getppid() != parent:  # a fork of the parent may still hold the pipe
                    raise EOFError
            request = connection.recv()
        except (EOFError, OSError):
            break
        error_text = None
        try:
            server.do(*request)
        except Exception as error:  # noqa: BLE001  # any error is sent back
            error_text = describe_error(error)
        connection.send((server.done, error_text))
        if request[0] == "finish":
            _exit(0)
    _abort(server)


class _TrackerServer:
    """Carries out requests on the tracker."""

    def __init__(self) -> None:
        self._class: Any = None
        self.tracker: Any = None
        self._calls: EntryCalls | None = None

    @property
    def done(self) -> int:
        """The number of completed entries of the last delivery."""
        return 0 if self._calls is None else self._calls.done

    def do(self, request: str, *details: Any) -> None:
        """Carry out a request."""
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
        self._calls = EntryCalls(self.tracker, [Entry(*entry) for entry in entries])
        self._calls.make()

    def _finish(self, outcome: str) -> None:
        self.tracker.outcome = outcome
        self.tracker.finish()


def _exit_after(parent: int) -> None:
    """Exit some time after the parent, whatever the tracker waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_GRACE)
    _exit(1)


def _abort(server: _TrackerServer) -> None:
    """Finish the tracker of a training program that was killed, within a time limit."""
    threading.Timer(_GRACE, _exit, [1]).start()
    if server.tracker is not None:
        server.tracker.abort()
    _exit(0)


def _exit(code: int) -> None:
    # Immediately: packages leave threads and exit hooks that wait for a network.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
