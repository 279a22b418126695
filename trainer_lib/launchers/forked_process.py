"""Start and end of a forked process, and the checks before its parent forks."""

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import active_children
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.process_group import LoneProcess
from trainer_lib.processes.parent_death import die_with_parent
from trainer_lib.state import AcceleratorState, GradientState, PartialState, is_initialized


def reset_states() -> None:
    """Reset rank, settings and gradient accumulation of this process, as if it had just started."""
    AcceleratorState.reset(reset_partial_state=True)
    GradientState.reset()


def check_call(function: Any, args: Any) -> None:
    """Raise unless `function(*args)` can be called."""
    if not callable(function):
        raise ConfigurationError(f"function must be callable (got {function!r}). Leave out its parentheses.")
    if not isinstance(args, (list, tuple)):
        raise ConfigurationError(f"args must be a tuple (got {args!r}). For one argument: args=(value,).")


def refuse_a_world(launcher: str) -> None:
    """Raise if this process is already part of a world: its forks would use its connections."""
    if dist.is_available() and dist.is_initialized():
        inside = "torch.distributed is initialized"
    elif is_initialized() and not isinstance(PartialState().group, LoneProcess):
        inside = "an Accelerator or PartialState with several processes exists"
    else:
        return
    raise WorldError(
        f"{launcher} starts processes, and {inside} in this process. Create the Accelerator inside the "
        "launched function; in a notebook, restart the kernel first."
    )


def begin(parent: int, variables: Mapping[str, str], threads: int) -> None:
    """Turn a copy of the parent into a fresh process."""
    # Objects of the parent (such as a loader with workers) must not be collected in this process.
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # a Python handler of the parent would not run inside a collective
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(parent, signal.SIGKILL)
    environment.set_variables(variables)
    reset_states()
    torch.set_num_threads(threads)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A Jupyter kernel's sends each part of a print by itself.
        if stream is not None and not isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, WholeLines(stream))


class WholeLines:
    """A stream that gets whole lines, so that those of several processes do not mix; a flush sends the rest too."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        lines, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end:
            self._stream.write(lines + end)
        return len(text)

    def flush(self) -> None:
        """Write what has no end of line yet."""
        line, self._line = self._line, ""
        if line:
            self._stream.write(line)
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def result_of(function: Callable[[], Any]) -> Any:
    """Return the result of a function; `None` if it ends its process without a failure, as `sys.exit()` does."""
    try:
        return function()
    except SystemExit as end:
        if end.code:
            raise
        return None


def leave(code: int = 1) -> NoReturn:
    """End this process with an exit code."""
    for child in active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
    # Not sys.exit: a thread that waits for the other processes would keep this one alive.
    os._exit(code)
