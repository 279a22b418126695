"""This file is ending early so that a run can go on: what asks for it, and the exit codes that tell of it."""

import signal
import sys
from typing import Any, NamedTuple

STOP_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
# What else can be a request to end; other signals tell of errors, of children, of terminals.
REQUESTS = tuple(name for name in (*STOP_SIGNALS, "SIGUSR2", "SIGXCPU", "SIGQUIT", "SIGBREAK") if hasattr(signal, name))
# Seconds in which further signals are the same request: a terminal sends it to all processes and a launcher passes it
# on, `timeout` sends it to a process and to its group.
SAME_REQUEST = 1.0
DEADLINE_CODE = 75  # EX_TEMPFAIL of sysexits.h: no error, to be tried again


class Interruption(NamedTuple):
    """What ended a run early.

    Attributes:
        reason: In words: "SIGTERM", or which deadline.
        exit_code: What the program is to end with: 128 and the number of the signal, or 75 for a deadline.
    """

    reason: str
    exit_code: int


class Interrupted(SystemExit):
    """A run that was asked to end, and has saved what there was: not caught, it ends the program with its exit code.

    It is no error, and `except Exception` does not take it for one.

    Attributes:
        result: What became of the run so far.
        reason: What asked for it.
        exit_code: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP, 138 for SIGUSR1, 75 for a deadline.
    """

    is_interruption = True  # for what runs the program and cannot import this

    def __init__(self, interruption: Interruption, result: Any = None) -> None:
        super().__init__(interruption.exit_code)
        self.reason, self.exit_code = interruption
        self.result = result


def by_signal(number: int) -> Interruption:
    """Return the interruption by a signal."""
    return Interruption(signal.Signals(number).name, 128 + number)


def reason_of(code: int) -> str | None:
    """Return what ended a program with this exit code early; `None` if it was none of these.

    Example:
        >>> reason_of(143), reason_of(75), reason_of(1)
        ('SIGTERM', 'a deadline', None)
    """
    if code == DEADLINE_CODE:
        return "a deadline"
    codes = {128 + getattr(signal, name): name for name in REQUESTS}
    return codes.get(code)


def exit_code_of(error: BaseException) -> int:
    """Return what a program is to end with for an error that nobody caught."""
    return error.exit_code if isinstance(error, Interrupted) else 1


def is_interactive() -> bool:
    """Whether somebody types the program as it runs: in a notebook or a shell of Python."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
