"""This file is the two ways to a tracker: by a call in this program, or by a process that can be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import psutil

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.tracking.base import GeneralTracker
from trainer_lib.tracking.delivery.entries import Entry, HandOver, told

_AT_WORK = 0.04  # of a processor
_BYTES = 1e6  # written to disk are as much as a second of a processor


class DeliveryError(TrainerLibError, RuntimeError):
    """A tracker failed, or did not answer.

    Attributes:
        done: How many entries it had taken by then, as far as is known.
    """

    def __init__(self, text: str, done: int = 0) -> None:
        super().__init__(text)
        self.done = done


@dataclass
class Making:
    """How a tracker is made.

    Attributes:
        tracker: Its class.
        arguments: The first arguments of its constructor: the project, and a folder where it takes one.
        options: The others, by name.
    """

    tracker: type[GeneralTracker]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def make(self) -> GeneralTracker:
        """Make it."""
        return self.tracker(*self.arguments, **self.options)


class Delivery(Protocol):
    """The way to a tracker."""

    def start(self, timeout: float) -> None:
        """Have the tracker begin."""
        ...

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Have it take entries."""
        ...

    def finish(self, outcome: str, timeout: float) -> None:
        """Have it end."""
        ...

    def computes(self, seconds: float) -> bool:
        """Whether it is seen at work, if one looks for some time: what computes is slow, and what hangs does not."""
        ...

    def cut(self) -> None:
        """Have nothing more to do with it."""
        ...


class LocalDelivery:
    """A tracker in this program; a call that hangs holds up the thread that makes it."""

    def __init__(self, making: Making | None, tracker: GeneralTracker | None = None) -> None:
        self._making = making
        self.tracker = tracker

    def start(self, timeout: float) -> None:
        """Make and start it."""
        del timeout
        if self.tracker is None:
            assert self._making is not None
            tracker = self._making.make()
            tracker.start()
            self.tracker = tracker
        else:
            self.tracker.start()

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Call it."""
        del timeout
        assert self.tracker is not None
        calls = HandOver(self.tracker, entries)
        try:
            calls.make()
        except Exception as error:
            raise DeliveryError(told(error), calls.done) from error

    def computes(self, seconds: float) -> bool:
        """Whether it is seen at work."""
        del seconds
        return False

    def finish(self, outcome: str, timeout: float) -> None:
        """Call it."""
        del timeout
        if self.tracker is not None:
            self.tracker.outcome = outcome
            self.tracker.finish()

    def cut(self) -> None:
        """Leave it where it is."""


class ChildDelivery:
    """A tracker in a process of its own, which is killed when it does not answer in time.

    Args:
        making: How it is made.
        log: A file for what it prints.
    """

    def __init__(self, making: Making, log: Path | None) -> None:
        self._making, self._log = making, log
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a process, with the tracker in it."""
        return self._connection is not None

    def start(self, timeout: float) -> None:
        """Start the process and the tracker in it."""
        self.cut()
        here, there = Pipe()
        try:
            self._process = self._popen(there)
        finally:
            there.close()
        self._connection = here
        self._ask(("import", self._making.tracker.__module__, self._making.tracker.__qualname__), timeout)
        try:
            self._ask(("start", self._making.arguments, dict(self._making.options)), timeout)
        except DeliveryError:
            self.cut()
            raise

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Send entries, and wait until the tracker has taken them."""
        if self._connection is None:
            self.start(timeout)
        self._ask(("deliver", [tuple(entry) for entry in entries]), timeout)

    def finish(self, outcome: str, timeout: float) -> None:
        """Have the tracker end, and then the process."""
        if self._connection is not None:
            try:
                self._ask(("finish", outcome), timeout)
            finally:
                self.cut()

    def computes(self, seconds: float) -> bool:
        """Whether the process uses the processor."""
        process = self._process
        if process is None:
            return False
        try:
            watched = psutil.Process(process.pid)
            before = _work(watched)
            time.sleep(seconds)
            return _work(watched) - before > _AT_WORK * seconds
        except psutil.Error:
            return False

    def cut(self) -> None:
        """Kill the process; whoever waits for it is told."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _popen(self, there: Connection) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "trainer_lib.tracking.delivery.tracker_process", str(there.fileno())]
        output: Any = subprocess.DEVNULL
        variables = dict(getattr(self._making.tracker, "environment", {}))
        variables = environment.with_defaults(variables)
        # It imports what this program can import.
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            output = self._log.open("ab")
        try:
            # A session of its own: Ctrl-C is for the training, which then says what becomes of its trackers.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[there.fileno()],
                start_new_session=True,
                env=variables,
            )
        finally:
            if output is not subprocess.DEVNULL:
                output.close()

    def _ask(self, request: tuple[Any, ...], timeout: float) -> None:
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise DeliveryError("its process is gone")
        until = time.monotonic() + timeout
        try:
            connection.send(request)
            while not connection.poll(0.5):
                if time.monotonic() > until:
                    self.cut()
                    raise DeliveryError(f"no answer in {timeout:.0f} s, so that its process was killed")
                if self._process is None:
                    raise DeliveryError("its process was killed")
            done, complaint = connection.recv()
        except (OSError, EOFError) as error:
            told = process.poll()
            self.cut()
            raise DeliveryError(f"its process ended{_how(told)}") from error
        if complaint is not None:
            raise DeliveryError(complaint, done)


def _work(process: psutil.Process) -> float:
    """Return what a process has done: seconds of a processor, and bytes written."""
    return sum(process.cpu_times()[:2]) + process.io_counters().write_bytes / _BYTES


def _how(code: int | None) -> str:
    if code is None:
        return ""
    return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
