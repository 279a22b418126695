"""The start of each process of `trainer-lib launch`, before its script.

The launcher runs it by its path, as `bootstrap.py PID_OF_THE_LAUNCHER [-m] SCRIPT …`, and mpirun as
`bootstrap.py mpirun [-m] SCRIPT …`. It imports only the standard library: the script may set variables that torch reads
at import.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import hashlib
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

MPIRUN = "mpirun"
# Open MPI kills its ranks two seconds after a SIGTERM to mpirun. It passes this signal on, and waits.
SIGTERM_OF_MPIRUN = signal.SIGUSR2

_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    """Do as `processes.parent_death`, which cannot be imported here."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before this call
        os.kill(os.getpid(), number)


def main() -> None:
    """Run the script as `python SCRIPT` or `python -m SCRIPT` would, and leave a record of how it failed."""
    launcher, *command = sys.argv[1:]
    if launcher == MPIRUN:
        signal.signal(SIGTERM_OF_MPIRUN, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    else:
        _die_with_parent(int(launcher), signal.SIGTERM)
    atexit.register(_leave_the_world)
    if sys.stderr is not None:  # it is closed in some services
        faulthandler.enable()  # a segmentation fault prints its stack
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Line buffering: no output is lost, and lines of several processes do not mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    as_module = command[0] == "-m"
    target, *arguments = command[as_module:]
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:  # the first entry is this file's folder, and the script expects its own
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(target))  # noqa: PTH109, PTH100, PTH120
    try:
        _run(target, as_module)
    except SystemExit as error:
        # An interruption ends all processes together: nothing failed.
        if error.code not in (None, 0) and not getattr(error, "is_interruption", False):
            _record(error)
        raise
    except BaseException as error:  # noqa: BLE001
        _report(error)
        _leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _run(target: str, as_module: bool) -> None:
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(target), run_name="__main__")  # noqa: PTH100


def _leave_the_world() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():  # maybe by the script itself
        from trainer_lib.process_group import leave_at_exit

        leave_at_exit()


def _leave(code: int) -> NoReturn:
    # Python has no public way to run exit handlers before os._exit.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or the script closed it
                stream.flush()
    # Not sys.exit: it would wait for threads, and for collectives that the other processes never answer.
    os._exit(code)


def _report(error: BaseException) -> None:
    """Print an error, unless another process has printed the same one to the same place, and leave a record of it."""
    # The launcher ends all processes when one has failed; this one finishes printing first.
    ended_by = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _record(error)
    if sys.stderr is not None and not _is_printed("".join(traceback.format_exception(error))):
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
    signal.signal(signal.SIGTERM, ended_by)


def _is_printed(text: str) -> bool:
    """Return whether a process of this machine and attempt has printed the text, and record that one has."""
    record = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not record:
        return False
    folder = os.path.dirname(os.path.dirname(record))  # noqa: PTH120
    try:
        target = os.fstat(sys.stderr.fileno())  # with --tee each process has a file of its own
        name = hashlib.sha256(f"{target.st_dev} {target.st_ino} {text}".encode()).hexdigest()
        os.close(os.open(os.path.join(folder, name[:16]), os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # noqa: PTH118
    except FileExistsError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _record(error: BaseException) -> None:
    error.__traceback__ = _without_this_file(error.__traceback__)
    sys.last_value = error  # as Python does: exit handlers see that the program failed
    # The format is that of torch's `record`; the launcher reads it, and torchrun above it if there is one.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):  # noqa: PTH110
        return
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}})
        )


def _without_this_file(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
