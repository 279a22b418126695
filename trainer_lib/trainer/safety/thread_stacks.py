"""Where the training thread of this rank is: its stack, and the data worker or the background save it waits for."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.data_loader.worker_process import STACKS_SIGNAL, worker_stacks

_SHOWN_FRAMES = 4
_MOST_FRAMES = 64  # compared to notice progress
_PATIENCE = 2.0  # seconds for a worker to write its stacks
_SETTLED = 10  # equal readings in a row, after which a text counts as complete
# By name: the loop imports what this module is part of, and only some runs need the writers.
_STEP, _EPOCH, _READ = "TrainLoop.micro_batch", "TrainLoop.epoch", "PreparedLoader.__iter__"
_WAIT_FOR_SAVE = BackgroundSaves.wait_until_released.__code__
_WRITE_FILE = ("CheckpointWriter.write", "CheckpointUploader.send")
# Files whose functions wait for other ranks when they are innermost.
_COLLECTIVES = ("/torch/distributed/", "/torch/autograd/", "/strategies/ddp/bucket_message.py")
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/IPython/core/debugger.py")


class Stack:
    """The stack of a thread as it is now, the innermost frame first.

    Args:
        thread: The number of the thread.
    """

    def __init__(self, thread: int | None) -> None:
        # Python documents this function, and gives it a private name.
        self.frames: list[FrameType] = list(_outwards(sys._current_frames().get(thread or 0)))  # pyright: ignore[reportPrivateUsage]
        waits = next((at for at, frame in enumerate(self.frames) if _reads_from_workers(frame)), None)
        self._reading = None if waits is None else self.frames[waits]
        # torch asks every few seconds whether the workers live: inside of that nothing moves.
        self._moving = self.frames if waits is None else self.frames[waits:]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where the thread is; it moved if this is another list than before."""
        return [(id(frame), frame.f_lasti) for frame in self._moving[:_MOST_FRAMES]]

    @property
    def waits_for_ranks(self) -> bool:
        """Whether it waits for other ranks, as far as can be seen."""
        file = self.frames[0].f_code.co_filename if self.frames else ""
        return any(part in file for part in _COLLECTIVES)

    @property
    def waits_for_save(self) -> bool:
        """Whether it waits for a save in the background."""
        return self._runs(_WAIT_FOR_SAVE)

    @property
    def file(self) -> str | None:
        """The file of a checkpoint that it writes."""
        writing = next((frame for frame in self.frames if frame.f_code.co_qualname in _WRITE_FILE), None)
        return None if writing is None else str(writing.f_locals.get("path", ""))

    @property
    def is_in_step(self) -> bool:
        """Whether it computes a micro-batch, or the update after it."""
        return _STEP in self._functions

    @property
    def is_in_data(self) -> bool:
        """Whether it gets the next batch to train on."""
        functions = self._functions
        return _EPOCH in functions and _READ in functions[: functions.index(_EPOCH)][-1:]

    @property
    def _functions(self) -> list[str]:
        return [frame.f_code.co_qualname for frame in self.frames]

    @property
    def is_compiling(self) -> bool:
        """Whether torch.compile works, which may take far longer than a step."""
        return self._is_in(_COMPILERS)

    @property
    def is_debugged(self) -> bool:
        """Whether somebody looks at it in a debugger."""
        return self._is_in(_DEBUGGERS)

    @property
    def worker(self) -> tuple[int, int] | None:
        """The number of the data worker whose batch it waits for, and its process."""
        if self._reading is None:
            return None
        reader: Any = self._reading.f_locals.get("self")
        with suppress(AttributeError, KeyError, IndexError):
            number = reader._task_info[reader._rcvd_idx][0]
            return number, reader._workers[number].pid
        return None

    @property
    def lines(self) -> list[str]:
        """The innermost frames in words."""
        shown = [frame for frame in self._moving if Path(frame.f_code.co_filename).name != "c10d_logger.py"]
        return [
            f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            for frame in shown[:_SHOWN_FRAMES]
        ]

    def _runs(self, code: CodeType) -> bool:
        return any(frame.f_code is code for frame in self.frames)

    def _is_in(self, files: tuple[str, ...]) -> bool:
        return any(part in frame.f_code.co_filename for frame in self.frames for part in files)


class WorkerWork:
    """Whether a data worker that is waited for works."""

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None

    def is_seen(self, pid: int, seconds: float) -> bool:
        """Whether it used the processor since the last time, some seconds ago."""
        import psutil

        try:
            used = sum(psutil.Process(pid).cpu_times()[:2])
        except psutil.Error:  # torch is about to notice that it died
            return True
        before, self._before = self._before, (pid, used)
        return before is None or before[0] != pid or used - before[1] > 0.01 * seconds


def stacks_of_worker(pid: int) -> str:
    """Return the stacks of all threads of a data worker, as it writes them itself."""
    before = worker_stacks(pid)
    if before is None:
        return ""
    with suppress(OSError):
        os.kill(pid, STACKS_SIGNAL)
    ends = time.monotonic() + _PATIENCE
    text, settled = before, 0  # it writes line by line: what is read may be the start
    while settled < _SETTLED and time.monotonic() < ends:
        time.sleep(0.02)
        last, text = text, worker_stacks(pid)
        settled = settled + 1 if text == last != before else 0
    return text or ""


def _reads_from_workers(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_get_data" and code.co_filename.endswith("/torch/utils/data/dataloader.py")


def _outwards(frame: Any) -> Iterator[FrameType]:
    """Yield a frame and those around it, up to torch's compiler: the frame that it compiles is not whole meanwhile."""
    while isinstance(frame, FrameType):
        yield frame
        frame = None if any(part in frame.f_code.co_filename for part in _COMPILERS) else frame.f_back
