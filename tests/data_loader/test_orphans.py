"""Data workers do not outlive the process they read for, even one that is killed."""

import os
import signal
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from trainer_lib.data_loader import prepare_data_loader


class Stuck(Dataset[int]):
    """Tells the process that reads it, and never returns a sample after the first."""

    def __init__(self, pids: Any) -> None:
        self.pids = pids

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.pids.send(os.getpid())
        threading.Event().wait()
        return index


def read(pids: Connection, context: str, in_thread: bool) -> None:
    os.setpgid(0, 0)
    loader = prepare_data_loader(
        DataLoader(Stuck(pids), num_workers=2, multiprocessing_context=context, persistent_workers=True),
        num_processes=1,
    )
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start() if in_thread else next(iter(loader))
    thread.join()


@pytest.mark.fault("`SIGKILL` for the group of a process that trains with data workers")
@pytest.mark.parametrize(
    ("context", "in_thread"),
    [
        ("fork", False),
        pytest.param("fork", True, marks=pytest.mark.slow),
        pytest.param("spawn", False, marks=[pytest.mark.slow, pytest.mark.launch]),
        pytest.param("forkserver", False, marks=[pytest.mark.slow, pytest.mark.launch]),
    ],
)
def test_data_workers_end_with_a_process_that_is_killed(context: str, in_thread: bool) -> None:
    receiver, sender = get_context("fork").Pipe()
    process = get_context("fork").Process(target=read, args=(sender, context, in_thread))
    process.start()
    sender.close()
    workers = [psutil.Process(receiver.recv()) for _ in range(2)]
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=5)
    for worker in alive:
        worker.kill()
    assert not alive
