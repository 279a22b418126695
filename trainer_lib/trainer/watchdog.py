"""This file is the watchdog: a thread that notices when no process of a run moves any more, says who hangs, and ends.

A process that waits for others sits in a call of C that no signal and no exception reaches; a thread beside it is not
held up. Each tells the others, through the store by which they met, where it is and since when. It is an end only if
nobody moves: who waits long for one that saves or evaluates is left to wait.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from trainer_lib.events import Run
from trainer_lib.foundation.failure_record import record_failure

EXIT_CODE = 70  # "an internal error of the software", for shells that ask
_LOOKS = 20  # in the time after which who does not move hangs
_MOST_BETWEEN_LOOKS = 5.0  # seconds
_SHOWN_FRAMES = 4
_IDLE = 0.1  # of a processor: who computes more than that does not hang
_WAITING = ("/torch/distributed/", "/torch/autograd/")  # where a process is that waits for others
_fits = itertools.count()


@dataclass
class _Peer:
    """What is known of another process: what it told last, and when that was news."""

    told: dict[str, Any] = field(default_factory=dict[str, Any])
    heard_at: float = 0.0


class Watchdog:
    """Watches the thread that makes it.

    Args:
        run: The run.
        timeout: The seconds without a move after which a process hangs.
        folder: Where the stacks of all threads are written to.
    """

    def __init__(self, run: Run, timeout: float, folder: Path) -> None:
        self._run, self._timeout, self._folder = run, timeout, folder
        self._rank, self._size = run.accelerator.process_index, run.accelerator.num_processes
        self._between = min(timeout / _LOOKS, _MOST_BETWEEN_LOOKS)
        self._watched = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._watched) if hasattr(time, "pthread_getcpuclockid") else None
        # Accelerators may be waited for by turning in circles, which looks like work.
        self._counts_work = self._clock is not None and run.accelerator.device.type == "cpu"
        own: Any = dist.distributed_c10d._get_default_store()  # of one's own, for another thread
        self._store = dist.PrefixStore(f"trainer_lib/watchdog/{next(_fits)}", own.clone())
        self._peers = {rank: _Peer() for rank in range(self._size) if rank != self._rank}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._at: Any = None  # where the watched thread was found last
        self._worked = 0.0
        self._moved = self._looked = time.monotonic()

    @property
    def stacks_file(self) -> Path:
        """Where this process writes its stacks."""
        return self._folder / f"hang-process-{self._rank}.txt"

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with contextlib.suppress(dist.DistError, OSError):  # the store is gone: its keeper was, and tells of itself
            for number in itertools.count():
                self._look(number)
                if self._ended.wait(self._between):
                    return

    def _look(self, number: int) -> None:
        now = time.monotonic()
        if now - self._looked > 3 * self._between:  # this whole process stood still, and so knows nothing
            self._moved = now
            for peer in self._peers.values():
                peer.heard_at = now
        self._looked = now
        if self._moves():
            self._moved = now
        idle = now - self._moved
        self._store.set(str(self._rank), json.dumps({"number": number, "idle": idle, **self._stand()}))
        if idle > 2 * self._between:
            self._hear(now)
            if idle >= self._timeout and not any(self._is_moving(peer, now) for peer in self._peers.values()):
                self._end(now)

    def _moves(self) -> bool:
        """Whether the watched thread is elsewhere than it was, or computed since."""
        run, frame = self._run, self._frame()
        places: list[tuple[int, int]] = []
        while frame is not None and len(places) < 16:
            places.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        before, self._at = self._at, (places, run.state.micro_batches, id(run.batch))
        if before != self._at or run.accelerator._background.is_writing:  # which may be waited for
            return True
        if not self._counts_work or self._clock is None:
            return False
        worked, self._worked = self._worked, time.clock_gettime(self._clock)
        return self._worked - worked > _IDLE * self._between

    def _stand(self) -> dict[str, Any]:
        """Return where the watched thread is, in words that others can be told."""
        frame = self._frame()
        file = "" if frame is None else frame.f_code.co_filename
        return {"step": self._run.state.step, "where": _where(frame), "waits": any(part in file for part in _WAITING)}

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched)

    def _hear(self, now: float) -> None:
        for rank, peer in self._peers.items():
            told = json.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else {}
            if told != peer.told or not peer.heard_at:
                peer.told, peer.heard_at = told, now

    def _is_moving(self, peer: _Peer, now: float) -> bool:
        """Whether a process is heard of, and moves; one that waits began to a little later than the first."""
        return now - peer.heard_at < self._timeout / 2 and peer.told.get("idle", 0.0) < self._timeout / 2

    def _end(self, now: float) -> NoReturn:
        heard = [rank for rank, peer in self._peers.items() if now - peer.heard_at < self._timeout / 2]
        text = self._text(now)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self.stacks_file.open("w") as file:
                faulthandler.dump_traceback(file)
        record_failure("HangError", text)
        if self._rank < min(heard, default=self._size):  # one of those that still can says it for all
            print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - a logger may be what hangs
        os._exit(EXIT_CODE)

    def _text(self, now: float) -> str:
        stands = {self._rank: self._stand(), **{rank: peer.told for rank, peer in self._peers.items()}}
        silent = {rank for rank, peer in self._peers.items() if now - peer.heard_at >= self._timeout / 2}
        # Who does not wait for the others is whom they wait for.
        hang = silent or {rank for rank, stand in stands.items() if not stand.get("waits")}
        verbs = {rank: "was last heard of" if rank in silent else "is" for rank in stands}
        lines = [f"  process {rank} {verbs[rank]} {_place(stand)}" for rank, stand in sorted(stands.items())]
        names = " and ".join(f"process {rank}" for rank in sorted(hang))
        whose = f"it is {names} that hangs" if names else "they all wait for one another"
        told = "\n".join(lines)
        return (
            f"No process has moved for {now - self._moved:.0f} s (hang_timeout={self._timeout:g}); {whose}.\n"
            f"{told}\n"
            f"The stacks of all threads are in {self._folder}/hang-process-*.txt. All processes end now, with exit "
            f'code {EXIT_CODE}; with resume="auto" a restart goes on from the last checkpoint.'
        )


@contextlib.contextmanager
def watched(run: Run, timeout: float | None, folder: Path | None) -> Generator[None]:
    """Return the block in which a run is watched, if it has several processes.

    Args:
        run: The run.
        timeout: The seconds; at most a little less than the backend waits, which can only say that it did.
        folder: Where the stacks go; by default one for temporary files.
    """
    of_backend = run.accelerator.group.timeout
    if timeout is None or of_backend is None:
        yield
        return
    folder = folder or Path(tempfile.gettempdir()) / f"trainer_lib-{os.getppid()}"
    watchdog = Watchdog(run, min(timeout, 0.8 * of_backend.total_seconds()), folder)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _where(frame: FrameType | None) -> list[str]:
    places: list[str] = []
    while frame is not None and len(places) < _SHOWN_FRAMES:
        name = Path(frame.f_code.co_filename).name
        if name != "c10d_logger.py":  # torch's, around each collective
            places.append(f"{frame.f_code.co_qualname} ({name}:{frame.f_lineno})")
        frame = frame.f_back
    return places


def _place(told: dict[str, Any]) -> str:
    if not told:
        return "before the first step"
    return f"in step {told['step'] + 1}, in {' ← '.join(told['where'])}"
