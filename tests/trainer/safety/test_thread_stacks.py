"""The stack of the training thread is read by another thread, while torch compiles too."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from trainer_lib.data_loader.worker_process import STACKS_SIGNAL
from trainer_lib.trainer.safety.thread_stacks import Stack, stacks_of_worker


def test_a_stack_ends_at_the_compiler() -> None:
    """Behind it is a frame that torch evaluates itself, in whose place another thread finds whatever is there."""
    thread, seen, is_done = threading.get_ident(), list[Stack](), threading.Event()

    def look() -> None:
        while not is_done.is_set():
            seen.append(Stack(thread))
            time.sleep(0.002)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        for size in range(3, 7):
            torch._dynamo.reset()
            torch.compile(lambda x: (x * 2).sin().sum(), backend="eager")(torch.ones(size))
    finally:
        is_done.set()
        watching.join()
    compiling = [stack for stack in seen if stack.is_compiling]
    assert compiling
    for stack in compiling:
        assert "torch/_dynamo/convert_frame.py" in stack.frames[-1].f_code.co_filename
    assert not Stack(thread).is_compiling


# A worker that is kept from the processor between two lines of its stacks.
SLOW_WORKER = """
import os, signal, sys, time
file = os.memfd_create("trainer_lib-stacks")

def write(*_):
    for line in (b"Thread 1", b" in select", b"Thread 2", b" in __getitem__"):
        os.write(file, line)
        time.sleep(0.05)

signal.signal(int(sys.argv[1]), write)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.launch
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="data workers write their stacks on Linux only")
def test_the_stacks_of_a_worker_are_read_when_all_are_written() -> None:
    command = [sys.executable, "-c", SLOW_WORKER, str(int(STACKS_SIGNAL))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            assert stacks_of_worker(worker.pid) == "Thread 1 in selectThread 2 in __getitem__"
        finally:
            worker.send_signal(signal.SIGKILL)
