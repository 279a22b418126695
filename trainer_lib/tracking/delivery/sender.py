"""Calls to a tracker: in this process, or in a separate process that can be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.tracking.base import GeneralTracker
from trainer_lib.tracking.delivery.entries import Entry, EntryCalls, describe_error

if TYPE_CHECKING:
    import psutil

_BUSY_SHARE = 0.04  # of a CPU
_BYTES = 1e6  # bytes written that count as one second of CPU


class DeliveryError(TrainerLibError, RuntimeError):
    """A tracker failed, or did not answer.

    Attributes:
        done: The number of entries it had accepted, if known.
    """

    def __init__(self, text: str, done: int = 0) -> None:
        super().__init__(text)
        self.done = done


@dataclass
class TrackerSpec:
    """How to create a tracker.

    Attributes:
        tracker: The tracker's class.
        arguments: The positional arguments of its constructor: the project, and the folder if it takes one.
        options: The keyword arguments.
    """

    tracker: type[GeneralTracker]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def make(self) -> GeneralTracker:
        """Create the tracker."""
        return self.tracker(*self.arguments, **self.options)


class Delivery(Protocol):
    """How entries reach a tracker."""

    def done(self, entries: list[Entry]) -> int:
        """Return how many entries of a delivery, which may be under way, are known to be accepted."""
        ...

    def start(self, timeout: float) -> None:
        """Start the tracker."""
        ...

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Deliver entries."""
        ...

    def finish(self, outcome: str, timeout: float) -> None:
        """Finish the tracker."""
        ...

    def computes(self, seconds: float) -> bool:
        """Whether the tracker uses the CPU, measured over some seconds: then it is slow and does not hang."""
        ...

    def cut(self) -> None:
        """Give the tracker up."""
        ...


class LocalDelivery:
    """A tracker in this process; a call that hangs blocks its thread."""

    def __init__(self, spec: TrackerSpec | None, tracker: GeneralTracker | None = None) -> None:
        self._spec = spec
        self.tracker = tracker
        self._calls: EntryCalls | None = None
        self._is_cut = False

    def done(self, entries: list[Entry]) -> int:
        """Return the number of completed calls."""
        calls = self._calls
        return calls.done if calls is not None and calls.entries is entries else 0

    def start(self, timeout: float) -> None:
        """Create and start the tracker."""
        del timeout
        if self.tracker is None:
            assert self._spec is not None
            tracker = self._spec.make()
            tracker.start()
            self.tracker = tracker
        else:
            self.tracker.start()

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Call the tracker."""
        del timeout
        assert self.tracker is not None
        self._calls = calls = EntryCalls(self.tracker, entries)
        if self._is_cut:
            calls.stop()
        try:
            calls.make()
        except BaseException as error:  # a package that ends its program raises SystemExit
            raise DeliveryError(describe_error(error), calls.done) from error

    def computes(self, seconds: float) -> bool:
        """Always false: its CPU use cannot be told from the training's."""
        del seconds
        return False

    def finish(self, outcome: str, timeout: float) -> None:
        """Call the tracker."""
        del timeout
        if self.tracker is not None:
            self.tracker.outcome = outcome
            self.tracker.finish()

    def cut(self) -> None:
        """Let the call under way be the last one: a thread cannot be killed."""
        self._is_cut = True
        if self._calls is not None:
            self._calls.stop()


class ChildDelivery:
    """A tracker in a separate process, which is killed when it does not answer in time.

    Args:
        spec: How to create the tracker.
        log: The file for the process's output.
    """

    def __init__(self, spec: TrackerSpec, log: Path | None) -> None:
        self._spec, self._log = spec, log
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def done(self, entries: list[Entry]) -> int:
        """Return 0: the process reports them when it answers."""
        del entries
        return 0

    @property
    def is_running(self) -> bool:
        """Whether the tracker's process is running."""
        return self._connection is not None

    def start(self, timeout: float) -> None:
        """Start the process, and the tracker in it."""
        self.cut()
        connection, child_end = Pipe()
        try:
            self._process = self._popen(child_end)
        finally:
            child_end.close()
        self._connection = connection
        self._ask(("import", self._spec.tracker.__module__, self._spec.tracker.__qualname__), timeout)
        try:
            self._ask(("start", self._spec.arguments, dict(self._spec.options)), timeout)
        except DeliveryError:
            self.cut()
            raise

    def deliver(self, entries: list[Entry], timeout: float) -> None:
        """Send entries, and wait until the tracker has accepted them."""
        if self._connection is None:
            self.start(timeout)
        self._ask(("deliver", [tuple(entry) for entry in entries]), timeout)

    def finish(self, outcome: str, timeout: float) -> None:
        """Finish the tracker, then end the process."""
        if self._connection is not None:
            try:
                self._ask(("finish", outcome), timeout)
            finally:
                self.cut()

    def computes(self, seconds: float) -> bool:
        """Whether the process uses the CPU."""
        import psutil

        process = self._process
        if process is None:
            return False
        try:
            watched = psutil.Process(process.pid)
            before = _work(watched)
            time.sleep(seconds)
            return _work(watched) - before > _BUSY_SHARE * seconds
        except psutil.Error:
            return False

    def cut(self) -> None:
        """Kill the process; a thread that waits for its answer gets an error."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _popen(self, child_end: Connection) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "trainer_lib.tracking.delivery.tracker_process", str(child_end.fileno())]
        output: Any = subprocess.DEVNULL
        variables = dict(getattr(self._spec.tracker, "environment", {}))
        variables = environment.with_defaults(variables)
        # The process can import whatever this program can.
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            output = self._log.open("ab")
        try:
            # A new session: Ctrl-C reaches only the training, which then finishes its trackers.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
                env=variables,
            )
        finally:
            if output is not subprocess.DEVNULL:
                output.close()

    def _ask(self, request: tuple[Any, ...], timeout: float) -> None:
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise DeliveryError("its process is not running")
        until = time.monotonic() + timeout
        try:
            connection.send(request)
            while not connection.poll(0.5):
                if time.monotonic() > until:
                    self.cut()
                    raise DeliveryError(f"no answer in {timeout:.0f} s, so its process was killed")
                if self._process is None:
                    raise DeliveryError("its process was killed")
            done, error_text = connection.recv()
        except (OSError, EOFError) as error:
            exit_code = process.poll()
            self.cut()
            raise DeliveryError(f"its process ended{_cause(exit_code)}") from error
        if error_text is not None:
            raise DeliveryError(error_text, done)


def _work(process: "psutil.Process") -> float:
    """Return a measure of a process's work: CPU seconds plus bytes written."""
    return sum(process.cpu_times()[:2]) + process.io_counters().write_bytes / _BYTES


def _cause(code: int | None) -> str:
    if code is None:
        return ""
    return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
