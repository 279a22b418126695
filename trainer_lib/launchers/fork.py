"""This file is a function on several forked processes of this machine, and their results in order of rank."""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from trainer_lib.foundation.errors import WorldError
from trainer_lib.options.base import check_count


def run_forked(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    timeout: float | None = None,
    **variables: str,
) -> list[Any]:
    """Run `function(*args)` on `num_processes` forked CPU processes and return what each returned.

    The function may be a closure: the processes are forks. What it returns has to be something `torch.save` can save.

    Args:
        function: What each process runs; it finds the variables that torchrun sets.
        args: Its arguments.
        num_processes: How many processes.
        timeout: Seconds after which all are ended and an error is raised.
        **variables: Further environment variables for the processes.

    Raises:
        WorldError: If a process raised or died; the message holds its traceback.
    """
    check_count("num_processes", num_processes)
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        workers = []
        for rank in range(num_processes):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "1",
                "FORK_LAUNCHED": "1",
                **variables,
            }
            workers.append(context.Process(target=_work, args=(function, tuple(args), place, Path(folder, str(rank)))))
        for worker in workers:
            worker.start()
        _wait(workers, timeout)
        _raise_first_failure(workers, folder, timeout)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(num_processes)]


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _work(function: Callable[..., Any], args: tuple[Any, ...], place: dict[str, str], result: Path) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)  # the processes share the cores
    try:
        torch.save(function(*args), result)
    except BaseException:
        result.with_suffix(".error").write_text(traceback.format_exc())
        # Not sys.exit: what the parent registered to run at exit must not run here.
        os._exit(1)
    os._exit(0)


def _wait(workers: list[Any], timeout: float | None) -> None:
    from multiprocessing.connection import wait
    from time import monotonic

    deadline = None if timeout is None else monotonic() + timeout
    running = {worker.sentinel: worker for worker in workers}
    while running:
        ended = wait(list(running), None if deadline is None else max(0.0, deadline - monotonic()))
        failed = [sentinel for sentinel in ended if running.pop(sentinel).exitcode != 0]
        if failed or not ended:
            # The others may wait for the dead one for ever.
            for worker in running.values():
                worker.terminate()
            for worker in running.values():
                worker.join(5)
                worker.kill()
            break
    for worker in workers:
        worker.join()


def _raise_first_failure(workers: list[Any], folder: str, timeout: float | None) -> None:
    for rank in range(len(workers)):
        error = Path(folder, str(rank)).with_suffix(".error")
        if error.exists():
            raise WorldError(f"Process {rank} of {len(workers)} raised:\n{error.read_text()}")
    for rank, worker in enumerate(workers):
        if worker.exitcode != 0:
            why = f"ended with exit code {worker.exitcode}"
            late = "" if timeout is None else f" (the limit was {timeout:g} seconds)"
            raise WorldError(f"Process {rank} of {len(workers)} {why}{late}.")
