"""Interruptions that a run can be resumed from: signals, deadlines, and their exit codes."""

import signal
import sys
from typing import Any, NamedTuple

STOP_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
# All signals that may ask a process to end; the others report errors, children or terminals.
REQUESTS = tuple(name for name in (*STOP_SIGNALS, "SIGUSR2", "SIGXCPU", "SIGQUIT", "SIGBREAK") if hasattr(signal, name))
# Seconds in which further signals are the same request: a terminal sends a signal to all processes and a launcher
# passes it on; `timeout` sends it to a process and to its group.
SAME_REQUEST = 1.0
DEADLINE_CODE = 75  # EX_TEMPFAIL of sysexits.h: not an error; try again


class Interruption(NamedTuple):
    """The cause of an interruption.

    Attributes:
        reason: The signal, such as "SIGTERM", or the deadline.
        exit_code: The exit code of the program: 128 plus the number of the signal, or 75 for a deadline.
    """

    reason: str
    exit_code: int


class Interrupted(SystemExit):
    """Raised when a signal or a deadline has ended a run and its checkpoint is saved; ends the program if not caught.

    It is not an error, so `except Exception` does not catch it.

    Attributes:
        result: The result of the run so far.
        reason: The signal or the deadline.
        exit_code: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP, 138 for SIGUSR1, 75 for a deadline.
    """

    exit_code: int
    reason: str

    is_interruption = True  # for programs around the training that cannot import this class

    def __init__(self, interruption: Interruption, result: Any = None) -> None:
        super().__init__(interruption.exit_code)
        self.reason, self.exit_code = interruption
        self.result = result


def by_signal(number: int) -> Interruption:
    """Return the interruption for a signal number."""
    return Interruption(signal.Signals(number).name, 128 + number)


def reason_of(code: int) -> str | None:
    """Return the reason of the interruption with this exit code; `None` if it is not the code of an interruption.

    Example:
        >>> reason_of(143), reason_of(75), reason_of(1)
        ('SIGTERM', 'a deadline', None)
    """
    if code == DEADLINE_CODE:
        return "a deadline"
    codes = {128 + getattr(signal, name): name for name in REQUESTS}
    return codes.get(code)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a program that ends with an uncaught error."""
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def is_interactive() -> bool:
    """Whether the program runs interactively: in a notebook or a Python shell."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
