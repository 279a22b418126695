"""The processes that tests run on: those that hang show where they were; a machine that stands still is not a hang."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import pytest
import torch.distributed as dist

from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.launchers import ProcessFailedError

_WORKS = """
from time import sleep
from tests.worlds import run_world

def work():
    print("at work", flush=True)
    sleep(2)
    return "done"

run_world(len, ((),))  # what takes longer, the first time
print(run_world(work, timeout=6))
"""


@pytest.mark.slow
def test_ranks_that_hang_show_their_stacks_and_are_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    def wait_for_nobody() -> None:
        state = PartialState()
        if state.is_main_process:
            dist.barrier()
        Event().wait()

    before = run_world(os.getpid)
    with pytest.raises(ProcessFailedError, match=r"did not end within 5 seconds: 0, 1\. Their stacks") as caught:
        run_world(wait_for_nobody, timeout=5)
    assert caught.value.exit_code == 124
    stacks = capfd.readouterr().err
    assert stacks.count("in wait_for_nobody") == 4
    assert stacks.count("in barrier") == 2
    assert not set(before) & set(run_world(os.getpid))


@pytest.mark.slow
def test_processes_without_a_call_keep_no_threads_of_gloo() -> None:
    def meet() -> tuple[int, int]:
        PartialState().wait_for_everyone()
        return os.getpid(), threads_of(os.getpid())

    met = run_world(meet)
    assert all(count > 1 for _, count in met)
    end = monotonic() + 60
    while monotonic() < end and any(threads_of(process) > 1 for process, _ in met):
        sleep(0.1)
    assert [threads_of(process) for process, _ in met] == [1, 1]
    assert [process for process, _ in run_world(meet)] == [process for process, _ in met], "the world still works"


def test_a_call_starts_at_the_log_level_of_a_fresh_process() -> None:
    def change() -> tuple[int, int]:
        before = logging.root.level
        logging.root.setLevel(logging.CRITICAL)
        return os.getpid(), before

    assert run_world(change) == run_world(change)


def threads_of(process: int) -> int:
    return len(list(Path(f"/proc/{process}/task").iterdir()))


@pytest.mark.slow
def test_a_machine_that_stands_still_is_not_a_hang() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WORKS], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as tests:
        assert tests.stdout is not None
        for _ in range(2):
            assert tests.stdout.readline() == "at work\n"
        os.killpg(tests.pid, signal.SIGSTOP)
        sleep(8)
        os.killpg(tests.pid, signal.SIGCONT)
        assert tests.stdout.read() == "['done', 'done']\n"
    assert tests.returncode == 0
