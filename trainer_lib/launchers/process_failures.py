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


def failed(failures: Iterable[Failure], num_processes: int, *, is_printed: bool = False) -> ProcessFailedError:
    """Return the error for processes that failed, with the first of them and its traceback first.

    Args:
        failures: All that failed by themselves, in any order.
        num_processes: How many there are in the world.
        is_printed: Whether the processes have printed their tracebacks; only the error is given then.
    """
    # A process that died without a word died before those that could still tell what its death did to them.
    first, *others = sorted(failures, key=lambda failure: (failure.traceback is not None, failure.when, failure.rank))
    parts = [f"Process {first.rank} of {num_processes} {first.how}{_end(first.traceback, is_printed)}"]
    if first.log is not None:
        parts.append(f"Its output is in {first.log}.")
    if others:
        parts.append(f"After that, {'; '.join(_briefly(other) for other in others)}.")
    exit_code = (first.exit_code or 1) if first.exit_code >= 0 else 128 - first.exit_code
    return ProcessFailedError("\n".join(parts), first.rank, exit_code)


def _end(traceback: str | None, is_printed: bool) -> str:
    if traceback is None:
        return "."
    return ":\n" + (_error_of(traceback) if is_printed else traceback.rstrip())


def _error_of(traceback: str) -> str:
    """Return the last error of a traceback, with its notes and without its frames."""
    lines = traceback.rstrip().splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[heads[-1] + 1 :] if heads else lines
    error = list(itertools.dropwhile(lambda line: line[:1].isspace(), after))
    return "\n".join(error or lines)


def _briefly(failure: Failure) -> str:
    if failure.traceback is None:
        return f"process {failure.rank} {failure.how}"
    # After the last indented line, where it was raised, comes the error, and then what was noted beside it.
    error = ""
    for before, line in itertools.pairwise(failure.traceback.splitlines()):
        if before[:1].isspace() and line and not line[0].isspace():
            error = line
    error = error or _error_of(failure.traceback)  # which has no frames, such as one of a script that cannot be read
    return f"process {failure.rank} raised {textwrap.shorten(error, _LINE, placeholder=' …')}"
