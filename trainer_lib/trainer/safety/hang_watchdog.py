"""Hang detection: a thread that ends the run when no rank makes progress, and names the rank that hangs.

A rank that waits for others sits in a call of C that no signal and no exception reaches; a thread beside it is not held
up. Each rank answers the others over connections of its own, so no rank and no launcher has to be alive for it. A rank
that waits for a slow one is not considered hung.
"""

import contextlib
import faulthandler
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer_lib.events import Run
from trainer_lib.foundation import environment
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.logging import get_logger
from trainer_lib.processes.exit_codes import is_interactive
from trainer_lib.processes.failure_record import record_failure
from trainer_lib.trainer.safety.rank_heartbeats import Peers
from trainer_lib.trainer.safety.save_watch import SaveWatch
from trainer_lib.trainer.safety.thread_stacks import Stack, WorkerWork, stacks_of_worker

if TYPE_CHECKING:
    from trainer_lib.accelerator.accelerator import Accelerator

EXIT_CODE = 70  # "an internal error of the software", for shells that ask
_LOOKS = 20  # during the timeout
_MOST_BETWEEN_LOOKS = 5.0  # seconds
_PATIENCE = (0.5, 2.0)  # seconds at least and at most for the others to answer
_LEAST_SILENCE = 2.0  # seconds, on a busy machine
_ASKED_WHILE_MOVING = 8  # ranks asked at each look, so that the last answer of a rank that stops is recent
_PATIENCE_WITH_SAVES = 1.5  # times the timeout
_GRACE = 2.0  # seconds for the others to end too, before an error of the backend ends them
_BUSY = 0.02  # of a processor: a thread that computes more than that moves

_logger = get_logger(__name__)


@dataclass(repr=False, eq=False)
class _Peer(LightDataclass):
    """What is known of another rank: its last answer, and when that came."""

    report: dict[str, Any] = field(default_factory=dict[str, Any])
    heard_at: float = 0.0
    is_gone: bool = False  # nobody listens any more

    @property
    def has_ended(self) -> bool:
        """Whether the rank has ended, or says that it ends."""
        return self.is_gone or bool(self.report.get("ends"))


class Watchdog:
    """Watches the thread that makes it. All ranks have to make one.

    Args:
        accelerator: The accelerator of the run.
        timeout: The seconds without progress after which a rank hangs.
        folder: Where the stacks of all threads are written to.
    """

    def __init__(self, accelerator: "Accelerator", timeout: float, folder: Path) -> None:
        self._saves, self._timeout, self._folder = accelerator.checkpoints.background, timeout, folder
        self._run: Run | None = None
        self._rank = accelerator.process_index
        self._between = min(timeout / _LOOKS, _MOST_BETWEEN_LOOKS)
        self._patience = min(max(timeout / 4, _PATIENCE[0]), _PATIENCE[1])
        self._watched = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._watched) if hasattr(time, "pthread_getcpuclockid") else None
        # Waiting for an accelerator may keep the processor busy, which looks like work.
        self._counts_work = self._clock is not None and accelerator.device.type == "cpu"
        world = environment.read_world()
        self._connections = Peers(accelerator.group, self._stand, None if world is None else world.master_addr)
        self._peers = {rank: _Peer() for rank in self._connections.ranks}
        self._turns = itertools.cycle(self._peers)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._at: Any = None  # where the watched thread was found last
        self._save = SaveWatch(self._saves, timeout)
        self._waits_for_save = False
        self._work = WorkerWork()
        self._worked = 0.0
        self._ends = False
        self._began_at = 0
        self._moved = self._looked = time.monotonic()

    @property
    def stacks_file(self) -> Path:
        """Where this rank writes its stacks."""
        return self._folder / f"hang-process-{self._rank}.txt"

    def follow(self, run: Run) -> None:
        """Count the steps of a run as progress from now on: it is set up, and its first step comes next."""
        self._began_at = run.state.micro_batches
        self._run = run

    def start(self) -> None:
        """Begin to watch."""
        if self._connections.can_answer:
            self._thread.start()
        else:
            _logger.warning("hang_timeout has no effect: a rank cannot listen on any port, so hangs go unnoticed.")

    def stop(self) -> None:
        """Watch no longer."""
        if self._thread.is_alive():
            self._connections.close()
            self._thread.join()
        self._connections.release()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for _ in range(3):  # at the next address of those that did not answer
            self._ask([rank for rank, peer in self._peers.items() if not peer.heard_at])
        unreachable = [rank for rank, peer in self._peers.items() if not peer.heard_at]
        if unreachable:
            _logger.warning(
                "Rank %d cannot reach rank %s over TCP to ask where it is, so it does not notice if that rank hangs.",
                self._rank,
                ", ".join(map(str, unreachable)),
                main_process_only=False,
            )
        self._moved = self._looked = time.monotonic()
        while not self._connections.serve(self._between):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > max(3 * self._between, self._timeout / 4) + self._patience:  # stopped, or suspended
            self._moved = now
            self._save.forgive(now)
            for peer in self._peers.values():
                peer.heard_at = peer.heard_at and now
        self._looked = now
        self._save.look(now)
        if self._moves(now):
            self._moved = now
        idle = now - self._moved
        if idle > 2 * self._between:
            self._ask(list(self._peers))
        else:
            self._ask([next(self._turns) for _ in range(min(_ASKED_WHILE_MOVING, len(self._peers)))])
        now = time.monotonic()
        self._save.hear([peer.report.get("save hangs", ()) for peer in self._peers.values()])
        # A rank stops waiting for a save that hangs once all ranks know that it hangs.
        patience = self._timeout * (_PATIENCE_WITH_SAVES if self._waits_for_save else 1)
        if idle >= patience and not any(self._is_moving(peer, now) for peer in self._peers.values()):
            self._end(now)
        if any(peer.report.get("ends") for peer in self._peers.values()) and idle >= self._timeout / 2:
            self._end(now)

    def _ask(self, ranks: Sequence[int]) -> None:
        answers = self._connections.ask(ranks, self._patience)
        for rank in ranks:
            peer = self._peers[rank]
            peer.is_gone = rank in answers.refused
            if rank in answers.facts:
                peer.report, peer.heard_at = answers.facts[rank], time.monotonic()

    def _moves(self, now: float) -> bool:
        """Whether this rank made progress: the training thread, the data worker it waits for, or a save."""
        stack, run = Stack(self._watched), self._run
        self._waits_for_save = stack.waits_for_save
        progress = None if run is None else (run.state.step, run.state.micro_batches, id(run.batch))
        # A step that takes this long hangs even if it computes, and so does reading once there was a batch. All other
        # code may compute for as long as it wants.
        has_read = run is not None and run.state.steps_in_epoch > 0 and run.state.micro_batches > self._began_at
        reads_on = has_read and stack.is_in_data
        is_strict = (stack.is_in_step or reads_on) and not stack.is_compiling
        before, self._at = self._at, (progress, None if is_strict else stack.places)
        if before != self._at or stack.is_debugged or self._save.is_moving:
            self._count_work()
            return True
        if (worker := stack.worker) is not None:
            return self._work.is_seen(worker[1], self._between) and not is_strict
        if not self._peers and not (is_strict or self._waits_for_save):  # a single rank may wait for a person who types
            return True
        return self._count_work() and not is_strict

    def _count_work(self) -> bool:
        """Whether the watched thread computed since the last time."""
        if not self._counts_work or self._clock is None:
            return False
        worked, self._worked = self._worked, time.clock_gettime(self._clock)
        return self._worked - worked > _BUSY * self._between

    def _stand(self) -> dict[str, Any]:
        """Return where this rank is, for the others."""
        stack = Stack(self._watched)
        report: dict[str, Any] = {
            "at": _position(self._run),
            "idle": time.monotonic() - self._moved,
            "where": stack.lines,
            "waits": stack.waits_for_ranks,
            "ends": self._ends,
            "save hangs": self._save.report,
        }
        saves = self._saves
        if (worker := stack.worker) is not None:
            report["for"] = f"waits for data worker {worker[0]} (pid {worker[1]}), "
        elif stack.waits_for_save and saves.target is not None:
            writing = [Stack(thread) for thread in saves.threads]
            report["for"] = f"waits for the save of {saves.target.name} in the background, "
            report["where"] = next((thread.lines for thread in writing), stack.lines)
            report["waits"] = any(thread.waits_for_ranks for thread in writing)
        return report

    def _is_moving(self, peer: _Peer, now: float) -> bool:
        """Whether a rank answers, and moves; one that waits began to a little later than the first."""
        if not peer.heard_at:  # it has never answered
            return True
        return self._is_heard(peer, now) and peer.report["idle"] < self._timeout / 2

    def _is_heard(self, peer: _Peer, now: float) -> bool:
        return now - peer.heard_at < max(self._timeout / 2, _LEAST_SILENCE)

    def _end(self, now: float) -> NoReturn:
        self._ends = True
        heard = [rank for rank, peer in self._peers.items() if self._is_heard(peer, now)]
        text = self._text(now)
        worker = Stack(self._watched).worker
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self.stacks_file.open("w") as file:
                faulthandler.dump_traceback(file)
                if worker is not None:
                    file.write(f"\nData worker {worker[0]} (pid {worker[1]}):\n{stacks_of_worker(worker[1])}")
        record_failure("HangError", text)
        recorded = time.time()
        leads = self._rank < min(heard, default=len(self._peers) + 1)  # the lowest rank that answers acts for all
        if leads:
            print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - a logger may hang
        self._wait_for(heard)
        if leads:
            self._kill_silent(heard, recorded)
        os._exit(EXIT_CODE)

    def _wait_for(self, ranks: Sequence[int]) -> None:
        """Wait until other ranks know of the end: connections that are gone would be an error for them."""
        deadline = time.monotonic() + _GRACE
        while left := [rank for rank in ranks if not self._peers[rank].has_ended]:
            if time.monotonic() > deadline:
                return
            self._ask(left)
            self._connections.serve(self._between / 4)

    def _kill_silent(self, heard: Sequence[int], recorded: float) -> None:
        """Kill ranks of this machine that cannot end themselves, unless their launcher does so at once."""
        if environment.launcher_kills_stopped_ranks():
            return
        silent = [rank for rank, peer in self._peers.items() if rank not in heard and not peer.is_gone]
        if silent and environment.error_file() is not None:
            # torch's agents name the first failure by whole seconds: it must be this one, not that of a killed rank.
            time.sleep(max(0.0, int(recorded) + 1 - time.time()))
        for rank in silent:
            self._connections.kill(rank)

    def _text(self, now: float) -> str:
        stands = {self._rank: self._stand(), **{rank: peer.report for rank, peer in self._peers.items()}}
        unheard = {rank: peer for rank, peer in self._peers.items() if not self._is_heard(peer, now)}
        gone = {rank for rank, peer in unheard.items() if peer.is_gone}
        # A rank that does not wait for the others is the one they wait for.
        hang = unheard.keys() - gone or {rank for rank, stand in stands.items() if not stand.get("waits")} - gone
        verbs = {**dict.fromkeys(unheard, "was last heard of"), **dict.fromkeys(gone, "has ended; it was last")}
        lines = [f"  rank {rank} {verbs.get(rank, 'is')} {_place(stand)}" for rank, stand in sorted(stands.items())]
        names = " and ".join(f"rank {rank}" for rank in sorted(hang or gone))
        verb = ("hang" if hang else "ended") + ("s" if len(hang) == 1 else "")
        whose = f"{names} {verb}" if names else "all ranks wait for one another"
        idle = max([now - self._moved, *(peer.report["idle"] for peer in self._peers.values() if peer.report)])
        positions = "\n".join(lines)
        return (
            f"No rank has made progress for {idle:.0f} s (hang_timeout={self._timeout:g}): {whose}.\n"
            f"{positions}\n"
            f"The stacks of all threads are in {self._folder}/hang-process-*.txt. All ranks end now, with exit code "
            f'{EXIT_CODE}; with resume="auto" a restart continues from the last checkpoint. If a step may take that '
            "long, raise hang_timeout."
        )


@contextlib.contextmanager
def watched(accelerator: "Accelerator", timeout: float | None, folder: Path | None) -> Generator[Callable[[Run], None]]:
    """Return the block in which a fit is watched; it yields what tells the watchdog which run begins its steps.

    Args:
        accelerator: The accelerator of the run.
        timeout: The seconds; at most a little less than the backend waits, whose error does not say for whom. `None`:
            the run is not watched, and neither is one of a single process that somebody types to.
        folder: Where the stacks go; by default one for temporary files.
    """
    backend_timeout = accelerator.group.timeout
    if timeout is None or (backend_timeout is None and is_interactive()):
        yield lambda _: None
        return
    if backend_timeout is not None:
        timeout = min(timeout, 0.8 * backend_timeout.total_seconds())
    folder = folder or Path(tempfile.gettempdir()) / f"trainer_lib-{os.getppid()}"
    watchdog = Watchdog(accelerator, timeout, folder)
    watchdog.start()
    try:
        yield watchdog.follow
    finally:
        watchdog.stop()


def _place(report: dict[str, Any]) -> str:
    if not report:
        return "before the first step"
    return f"{report['at']}, {report.get('for', '')}in {' ← '.join(report['where'])}"


def _position(run: Run | None) -> str:
    if run is None:
        return "before the first step"
    return f"after step {run.state.step}" if run.state.has_ended else f"in step {run.state.step + 1}"
