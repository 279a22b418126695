"""The signals that ask a run to save and end: caught during a fit, restored after it.

A handler only takes a note; `Control` brings it to the other processes with the gradients of the next update.
"""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from torch.utils.data import get_worker_info

from trainer_lib.events import Control
from trainer_lib.logging import get_logger
from trainer_lib.processes.exit_codes import SAME_REQUEST, by_signal, is_interactive

_logger = get_logger(__name__)


class Signals:
    """Notes the signals that ask a run to end, for the length of a `with` block.

    A second signal ends the process at once, also where it waits for other processes or for a disk: a thread sees to
    that, which starts with the first one. In a notebook, which is to stay, it is a KeyboardInterrupt.

    Args:
        names: Which.
        control: The requests of the run, which the first signal is noted in.
        is_main: Whether this process tells somebody who pressed a key what happens.

    Attributes:
        control: The requests of the run.
        caught: Those that are noted.
        left: Those that are not, each with the reason.
    """

    control: Control

    def __init__(self, names: Sequence[str], control: Control, is_main: bool) -> None:
        self.control, self._is_main, self._process = control, is_main, os.getpid()
        self._is_interactive = is_interactive()
        self._before: dict[int, Any] = {}
        self._noted: list[int] = []
        self._first_at: float | None = None
        self._wakeup: tuple[int, int] | None = None  # the descriptor set before, and the one that wakes the thread
        self.caught: list[str] = []
        self.left: dict[str, str] = {}
        for name in names:
            if (reason := _reason_to_leave(getattr(signal, name))) is None:
                self.caught.append(name)
            else:
                self.left[name] = reason

    def __enter__(self) -> "Signals":
        for name in self.caught:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._note)
        if self.left and threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "fit runs outside of the main thread, where signals cannot be caught: %s end it without a checkpoint. "
                "Call it in the main thread, or give stop_signals=[].",
                " and ".join(self.left),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else other code has replaced it
                signal.signal(number, handler)
        if self._wakeup is not None:
            (before, writes), self._wakeup = self._wakeup, None
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            os.close(writes)  # the thread reads the end, and closes its own

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:
            self._hand_back(number)
            return
        if self._first_at is None:
            self._first_at = time.monotonic()
            self.control.interruption = by_signal(number)
            if not self._is_interactive:
                self._watch()
            if self._is_main and number == signal.SIGINT:
                _say("\nCtrl-C: the run ends after this step. Once more ends it at once.\n")
        elif self._is_interactive and time.monotonic() > self._first_at + SAME_REQUEST:
            raise KeyboardInterrupt
        if number not in self._noted:
            self._noted.append(number)

    def hand_on(self) -> None:
        """Call the user's handlers for the signals that came: now that all is saved, they may end the process."""
        for number in self._noted:
            before = self._before[number]
            if callable(before) and before is not signal.default_int_handler:
                before(number, None)  # a kept frame would have kept the tensors of its step in memory

    def _hand_back(self, number: int) -> None:
        """Do in a fork what the signal did before. Of a loader's worker it is the training that sees to its end."""
        if get_worker_info() is None or number == signal.SIGTERM:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        """Have a thread see the signals to come, while this one may wait in a call that no handler interrupts."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        self._wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False), writes
        # Not threading.Thread: this handler may have come while its lock is held.
        _thread.start_new_thread(_end_at_another, (reads, set(self._before), time.monotonic()))


def _end_at_another(reads: int, numbers: set[int], first_at: float) -> None:
    while came := os.read(reads, 1):
        if came[0] in numbers and time.monotonic() > first_at + SAME_REQUEST:
            _say(f"{signal.Signals(came[0]).name} again: the run ends at once. Earlier checkpoints are intact.\n")
            os._exit(128 + came[0])
    os.close(reads)


def _reason_to_leave(number: int) -> str | None:
    if threading.current_thread() is not threading.main_thread():
        return "outside of the main thread"
    before: Callable[..., Any] | int | None = signal.getsignal(number)
    if before is signal.SIG_IGN:
        return "ignored by this process"
    return "caught by a library" if before is None else None


def _say(text: str) -> None:
    # Not sys.stderr, which this may have come in the middle of.
    try:
        os.write(2, text.encode())
    except OSError:  # the terminal is gone
        return
