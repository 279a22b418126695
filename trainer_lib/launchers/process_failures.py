"""Errors for failed processes: which failed first, and how."""

import itertools
import json
import signal
import textwrap
from collections.abc import Iterable
from pathlib import Path

from trainer_lib.foundation.errors import WorldError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.processes.exit_codes import reason_of

# Seconds. After a death the other processes cannot continue, and may wait for the dead one in an uninterruptible
# collective.
GRACE_AFTER_DEATH = 3

_LINE = 160  # characters of an error that followed another one


class ProcessFailedError(WorldError):
    """A started process that raised, died or did not end in time.

    Args:
        message: The message.
        rank: The process that failed first.
        exit_code: The highest exit code of all that failed, as in a shell: 128 plus the number of a signal that killed
            one. Those of interruptions count only if there are no others.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


@frozen_dataclass(kw_only=True)
class Failure:
    """How one process failed.

    Args:
        rank: Its rank in the world.
        exit_code: Its exit code; if negative, the signal that killed it.
        traceback: The traceback of its error; `None` if it could not write one.
        when: The time of its error, in nanoseconds.
        log: The file of its output, if there is one.
    """

    rank: int
    exit_code: int
    traceback: str | None = None
    when: int = 0
    log: str | None = None

    @property
    def how(self) -> str:
        """How the process ended, in a few words."""
        if self.exit_code == 0:
            return "ended without a result (exit code 0)"
        if self.exit_code > 0:
            return f"failed with exit code {self.exit_code}"
        hint = " (by hand, or for want of memory)" if -self.exit_code == signal.SIGKILL else ""
        return f"was killed by {signal_name(-self.exit_code)}{hint}"

    @property
    def is_interruption(self) -> bool:
        """Whether the exit code is that of an interruption: a signal that the process handled, or a deadline."""
        return reason_of(self.exit_code) is not None

    @property
    def is_first_cause(self) -> bool:
        """Whether the process chose its exit code. Unlike an error, this cannot follow from the end of another."""
        return self.traceback is None and self.exit_code > 0 and not self.is_interruption

    @property
    def shell_code(self) -> int:
        """Its exit code as in a shell, which is never that of success."""
        return (self.exit_code or 1) if self.exit_code >= 0 else 128 - self.exit_code


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def failure_of(
    rank: int, exit_code: int | None, record: Path, log: str | None = None, *, final_code: int | None = None
) -> Failure:
    """Return the failure of a process that failed by itself, or that left a record of an error.

    Args:
        rank: Its rank in the world.
        exit_code: Its exit code when the launcher ended the processes; `None` if it ran then.
        record: The file of its error, which it may not have written.
        log: The file of its output, if there is one.
        final_code: Its exit code after the launcher ended the processes. It counts for one that ran then and chose its
            code: that of an error, not of an interruption.
    """
    has_record = record.is_file()
    if exit_code is None and final_code is not None and final_code > 0 and not reason_of(final_code):
        exit_code = final_code
    return Failure(
        rank=rank,
        # The launcher may have killed a process that had recorded its error but not ended yet.
        exit_code=1 if exit_code is None or (has_record and exit_code < 0) else exit_code,
        traceback=_traceback(record) if has_record else None,
        when=record.stat().st_mtime_ns if has_record else 0,
        log=log,
    )


def failed(failures: Iterable[Failure], num_processes: int, *, is_printed: bool = False) -> ProcessFailedError:
    """Return the error for failed processes, which ends with the traceback of the first failure.

    Args:
        failures: All failures, in any order.
        num_processes: The world size.
        is_printed: Whether the processes have printed their tracebacks; a single one is not repeated, only its error.
    """
    # A process without a traceback was killed first; the others raised because it was gone. An interruption is not what
    # failed.
    first, *others = sorted(failures, key=lambda f: (f.traceback is not None, f.is_interruption, f.when, f.rank))
    parts = [f"Process {first.rank} of {num_processes} {first.how}."]
    if others:
        parts.append(f"After that, {'; '.join(_briefly(other) for other in others)}.")
    if first.log is not None:
        parts.append(f"The output of process {first.rank} is in {first.log}.")
    if first.traceback is not None:
        is_alone = {failure.traceback for failure in others} <= {first.traceback, None}
        parts.append(_error_of(first.traceback) if is_printed and is_alone else first.traceback.rstrip())
    errors = [failure for failure in (first, *others) if not failure.is_interruption] or [first, *others]
    worst = max(failure.shell_code for failure in errors)
    return ProcessFailedError("\n".join(parts), first.rank, worst)


def _traceback(record: Path) -> str:
    try:
        message = json.loads(record.read_text())["message"]
    except ValueError:
        return "an error that is not known: the process was killed while it recorded it"
    return message if isinstance(message, str) else message["extraInfo"]["py_callstack"]


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
    error = _error_of(failure.traceback)
    if not error[:1].isspace():  # all lines of an exception group are indented
        error = error.partition("\n")[0]
    return f"process {failure.rank} raised {textwrap.shorten(error, _LINE, placeholder=' …').rstrip('.')}"
