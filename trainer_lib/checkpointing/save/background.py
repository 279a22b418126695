"""This file is saves behind the training: a thread writes one at a time, and who waits for it hears of its failure."""

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from multiprocessing import util
from typing import TYPE_CHECKING

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup

if TYPE_CHECKING:
    from trainer_lib.checkpointing.format.snapshot import Snapshots

_logger = get_logger(__name__)

# Seconds that the others have to answer when this process ends with an error: they may never do.
_PATIENCE_AFTER_AN_ERROR = 10.0

UPLOAD_THREADS = "upload"  # what the names of threads begin with that send files


class BackgroundSaves:
    """The thread that writes, and what it needs: a snapshot, and a group of processes of its own."""

    def __init__(self) -> None:
        self._snapshots: Snapshots | None = None
        self._thread: threading.Thread | None = None
        self._target: AnyPath | None = None
        self._error: BaseException | None = None
        self._written_at: float | None = None
        self._hang: str | None = None
        self._has_ended = False
        self._released = threading.Event()  # once it has ended, or hangs
        self.ended_at = 0.0  # the last one, by time.monotonic
        self.nonfinite: list[str] = []  # what makes the last one not finite, on any process
        self.infinite_states: list[str] = []  # its optimizer states with an infinity
        self._groups: tuple[ProcessGroup, ProcessGroup] | None = None

    @property
    def snapshots(self) -> "Snapshots":
        """Where the tensors of a state are copied to before it is written."""
        from trainer_lib.checkpointing.format.snapshot import Snapshots

        if self._snapshots is None:
            self._snapshots = Snapshots()
        return self._snapshots

    @property
    def is_running(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_writing(self) -> bool:
        """Whether the part of this process is being written, and it does not wait for those of others."""
        return self.is_running and self._written_at is None

    @property
    def hang(self) -> str | None:
        """Where the save hangs, as `report_hang` was told; `None` if it does not."""
        return self._hang if self.is_running else None

    @property
    def target(self) -> "AnyPath | None":
        """The folder of the save that is being written."""
        return self._target

    @property
    def threads(self) -> list[int]:
        """The threads that write: those that send files for a save, and that of the save."""
        own = self._thread
        sending = [thread for thread in threading.enumerate() if thread.name.startswith(UPLOAD_THREADS)]
        return [thread.ident for thread in (*sending, own) if thread is not None and thread.ident is not None]

    def group(self, beside: ProcessGroup) -> ProcessGroup:
        """Return a group of the same processes for the thread; made at the first call, of all of them."""
        if self._groups is None or self._groups[0] is not beside:
            self._groups = beside, beside.another()
        return self._groups[1]

    def start(self, target: AnyPath, work: Callable[[], object]) -> None:
        """Have a thread do the work that makes `target`; the one before has to be waited for."""
        _wait_at_exit(self)
        self._target, self._error, self._written_at = target, None, None
        self._hang, self._has_ended, self._released = None, False, threading.Event()
        # A daemon, as Python waits for any other thread for ever: `at_exit` knows better.
        self._thread = threading.Thread(target=self._do, args=(work,), name=f"save of {target.name}", daemon=True)
        self._thread.start()

    def mark_written(self) -> None:
        """Note that the part of this process is on the disk: now it depends on the others."""
        self._written_at = time.monotonic()

    def report_hang(self, where: str | None) -> None:
        """Note that the save hangs, so that nobody waits for it; or, with `None`, that it moves again."""
        before, self._hang = self._hang, where
        if where is not None:
            self._released.set()
        elif before is not None:
            self._released = threading.Event()
            if self._has_ended:
                self._released.set()

    def wait_until_released(self) -> None:
        """Wait until the save has ended, or hangs."""
        if self._thread is not None:
            self._released.wait()

    def wait(self) -> None:
        """Wait until the state is there.

        Raises:
            CheckpointError: If it could not be written; once.
            UnwritableError: If the save hangs.
        """
        self.wait_until_released()
        if (hang := self.hang) is not None:
            raise UnwritableError(hang)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kind = UnwritableError if isinstance(error, UnwritableError) else CheckpointError
            raise kind(f"The state {self._target} could not be saved in the background. {error}") from error

    def release(self) -> None:
        """Wait, and give back the memory; a failure is told by the log, as nobody asks for the state here."""
        with self._told():
            self.wait()
        self._snapshots = None

    def at_exit(self) -> None:
        """Wait as the process ends: never for a save that hangs; after an error, for other ranks a few seconds."""
        if self.hang is not None:  # which was logged
            return
        while self.is_running and hasattr(sys, "last_value"):
            if self._written_at is not None and time.monotonic() > self._written_at + _PATIENCE_AFTER_AN_ERROR:
                _logger.error("The state %s is not saved: the other processes did not answer.", self._target)
                return
            time.sleep(0.05)
        with self._told():
            self.wait()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the main thread has to hear of it
            self._error = error
        self.ended_at = time.monotonic()
        self._has_ended = True
        self._released.set()

    @contextlib.contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except CheckpointError as error:
            _logger.error("%s", error, main_process_only=False)


_known: "weakref.WeakSet[BackgroundSaves]" = weakref.WeakSet()
_waiting: set[int] = set()  # the processes, of which one may be a fork of another, that wait as they end


def _wait_at_exit(saves: BackgroundSaves) -> None:
    _known.add(saves)
    if os.getpid() not in _waiting:
        _waiting.add(os.getpid())
        # After the world has formed, and so before it is left. A forked process runs multiprocessing's functions only.
        atexit.register(_at_exit)
        # That is after the end of all pools of threads, which uploads need; what Python has for before it has no
        # public name.
        threading_at_exit: Callable[[Callable[[], None]], None] | None = vars(threading).get("_register_atexit")
        if threading_at_exit is not None:
            threading_at_exit(_at_exit)
        util.Finalize(None, _at_exit, exitpriority=100)


def _at_exit() -> None:
    for saves in list(_known):
        saves.at_exit()
