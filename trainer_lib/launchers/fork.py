"""Run a function on several forked processes of this machine, and return their results in order of rank."""

import faulthandler
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from trainer_lib.launchers.forked_process import begin, check_call, leave, refuse_a_world, result_of
from trainer_lib.launchers.launch_plan import LOCALHOST
from trainer_lib.launchers.process_failures import Failure, ProcessFailedError, failed
from trainer_lib.options.base import check_count, check_positive
from trainer_lib.processes.exit_codes import exit_code_of
from trainer_lib.processes.ports import free_port
from trainer_lib.processes.proc_stat import is_exiting

_GRACE = 5.0  # seconds that a process gets to end after SIGTERM
_POLL = 0.1  # seconds between two checks for dead processes
_INSTANT = 0.001  # seconds that suffice to see whether a process has closed its files
_TIMED_OUT = 124  # the exit code of `timeout`, in shells


def run_forked(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    timeout: float | None = None,
    **variables: str,
) -> list[Any]:
    """Run `function(*args)` on `num_processes` forked CPU processes and return what each returned.

    The function may be a closure: the processes are forks. `torch.save` has to be able to save its result.

    Args:
        function: What each process runs; it finds the variables that torchrun sets.
        args: Its arguments.
        num_processes: How many processes.
        timeout: Seconds after which all are ended and an error shows the stack of each.
        **variables: Further environment variables for the processes.

    Raises:
        ProcessFailedError: If a process raised, died or did not end in time; the message holds its traceback.
    """
    check_call(function, args)
    check_count("num_processes", num_processes)
    if timeout is not None:
        check_positive("timeout", timeout)
    refuse_a_world("run_forked")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        workers = [_Worker(rank, Path(folder)) for rank in range(num_processes)]
        try:
            for worker in workers:
                worker.start(function, args, {**rank_variables(worker.rank, num_processes, port, folder), **variables})
            _wait(workers, timeout)
        finally:
            _end(workers)
        return [torch.load(worker.result, weights_only=False) for worker in workers]


class _Worker:
    """One process, and the files through which it answers."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.result, self.error, self.stacks = (folder / f"{rank}.{kind}" for kind in ("result", "error", "stacks"))

    def start(self, function: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str]) -> None:
        """Fork."""
        self.process = get_context("fork").Process(target=self._work, args=(os.getpid(), function, args, variables))
        self.process.start()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return hasattr(self, "process") and self.process.is_alive()

    def failure(self) -> Failure | None:
        """How the process failed, if it has by now."""
        code = self.process.exitcode
        if code is None or (code == 0 and self.result.exists()):
            return None
        raised = self.error.exists()
        return Failure(
            rank=self.rank,
            exit_code=code,
            traceback=self.error.read_text() if raised else None,
            when=self.error.stat().st_mtime_ns if raised else 0,
        )

    def _work(
        self, parent: int, function: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str]
    ) -> None:
        try:
            # One thread: OpenMP's threads do not survive a fork, and a parallel region would wait for them without end.
            begin(parent, variables, threads=1)
            with self.stacks.open("w") as stacks:
                # In C, since Python's handlers would wait for the end of a collective that hangs.
                faulthandler.register(signal.SIGUSR2, stacks, chain=True)
                torch.save(result_of(partial(function, *args)), self.result)
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            self.error.write_text(traceback.format_exc())
            leave(exit_code_of(error))


def rank_variables(rank: int, size: int, port: int, folder: str) -> dict[str, str]:
    """Return the environment of one rank of a world on this machine, with a rendezvous in a folder."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOCALHOST,
        # The rendezvous is a file. A store on a port would have a serving thread in the parent, which may hold a lock
        # of the resolver at a fork: then the child would wait without end. The port is for functions that form another
        # group.
        "MASTER_PORT": str(port),
        "TRAINER_LIB_STORE_FILE": str(Path(folder, "store")),
        "TRAINER_LIB_WORLD_SIZE": str(size),
        "ACCELERATE_USE_CPU": "1",
        "FORK_LAUNCHED": "1",
    }


def _wait(workers: Sequence[_Worker], timeout: float | None) -> None:
    deadline = None if timeout is None else monotonic() + timeout
    while True:
        running = [worker for worker in workers if worker.is_running]
        failures = [failure for worker in workers if (failure := worker.failure())]
        if failures:
            # A killed process closes its files, which other processes notice, before it counts as dead.
            for worker in running:
                worker.process.join(_INSTANT)  # waits for the end of one whose files are closed
                _wait_if_dying(worker)
            raise failed(filter(None, (worker.failure() for worker in workers)), len(workers))
        if not running:
            return
        if deadline is not None and monotonic() > deadline:
            raise _late(running, len(workers), timeout)
        # With a short timeout, since a child of a dead worker keeps its sentinel open.
        wait([worker.process.sentinel for worker in running], _POLL)


def _wait_if_dying(worker: _Worker) -> None:
    deadline = monotonic() + _GRACE
    while worker.is_running and is_exiting(worker.process.pid) and monotonic() < deadline:
        sleep(_INSTANT)


def _late(workers: Sequence[_Worker], num_processes: int, timeout: float | None) -> ProcessFailedError:
    for worker in workers:
        if worker.is_running and worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGUSR2)
    for worker in workers:
        worker.process.join(_GRACE)
    where = "".join(f"\nProcess {worker.rank} was here:\n{_stacks(worker)}" for worker in workers)
    ranks = ", ".join(str(worker.rank) for worker in workers)
    return ProcessFailedError(
        f"Of {num_processes} processes, these did not end within {timeout:g} seconds: {ranks}.{where}",
        workers[0].rank,
        _TIMED_OUT,
    )


def _stacks(worker: _Worker) -> str:
    return worker.stacks.read_text().rstrip() if worker.stacks.exists() else "(it had not begun)"


def _end(workers: Iterable[_Worker]) -> None:
    started = [worker.process for worker in workers if hasattr(worker, "process")]
    for process in started:
        process.terminate()
    for process in started:
        process.join(_GRACE)
        process.kill()
        process.join()
