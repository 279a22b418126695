"""This file is the processes that failed: which one did first, and how that is told."""

import itertools
import signal
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from trainer_lib.foundation.errors import WorldError

_LINE = 160  # characters of an error that only followed from another


class ProcessFailedError(WorldError):
    """A started process that raised, died or did not end in time.

    Args:
        message: What is to be told.
        rank: The process that failed first.
        exit_code: Its exit code, as a shell gives it: 128 and the number of the signal for those killed by one.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one process failed.

    Args:
        rank: Its rank in the world.
        exit_code: Its exit code; negative, it is the signal that killed it.
        traceback: What it raised, if it could still tell.
        when: When it told, in nanoseconds.
        log: Where its output is, if that goes to a file.
    """

    rank: int
    exit_code: int
    traceback: str | None = None
    when: int = 0
    log: str | None = None

    @property
    def how(self) -> str:
        """The end of the process in a few words."""
        if self.exit_code == 0:
            return "ended without a result (exit code 0)"
        if self.exit_code > 0:
            return f"failed with exit code {self.exit_code}"
        hint = " (by hand, or for want of memory)" if -self.exit_code == signal.SIGKILL else ""
        return f"was killed by {signal_name(-self.exit_code)}{hint}"


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def failed(failures: Iterable[Failure], num_processes: int, lines: int | None = None) -> ProcessFailedError:
    """Return the error for processes that failed, with the first of them and its traceback first.

    Args:
        failures: All that failed by themselves, in any order.
        num_processes: How many there are in the world.
        lines: How many of the last lines of the traceback to show.
    """
    # A process that died without a word died before those that could still tell what its death did to them.
    first, *others = sorted(failures, key=lambda failure: (failure.traceback is not None, failure.when, failure.rank))
    parts = [f"Process {first.rank} of {num_processes} {first.how}{_last(first.traceback, lines)}"]
    if first.log is not None:
        parts.append(f"Its output is in {first.log}.")
    if others:
        parts.append(f"After that, {'; '.join(_briefly(other) for other in others)}.")
    exit_code = (first.exit_code or 1) if first.exit_code >= 0 else 128 - first.exit_code
    return ProcessFailedError("\n".join(parts), first.rank, exit_code)


def _last(traceback: str | None, lines: int | None) -> str:
    if traceback is None:
        return "."
    shown = traceback.rstrip().splitlines()
    if lines is not None and len(shown) > lines:
        shown = ["…", *shown[-lines:]]
    return ":\n" + "\n".join(shown)


def _briefly(failure: Failure) -> str:
    if failure.traceback is None:
        return f"process {failure.rank} {failure.how}"
    # After the last indented line, where it was raised, comes the error, and then what was noted beside it.
    error = ""
    for before, line in itertools.pairwise(failure.traceback.splitlines()):
        if before[:1].isspace() and line and not line[0].isspace():
            error = line
    return f"process {failure.rank} raised {textwrap.shorten(error, _LINE, placeholder=' …')}"
