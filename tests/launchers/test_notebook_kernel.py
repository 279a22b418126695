"""`notebook_launcher` in a real Jupyter kernel: launched twice, and interrupted as the stop button does."""

import time
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

LIMIT = 90

SETUP = """
import os, signal, psutil
from trainer_lib import PartialState, debug_launcher, notebook_launcher
template = "rank {}"

def wait(ready):
    state = PartialState()
    state.wait_for_everyone()
    print(ready, state.process_index, flush=True)
    signal.pause()
"""
LAUNCH = """
def fill(text):
    state = PartialState()
    state.wait_for_everyone()
    return template.format(state.process_index) + text
print(notebook_launcher(fill, ("!",), num_processes=2), debug_launcher(lambda: PartialState().num_processes))
"""
LINES = """
import sys
def write_by_turns():
    state = PartialState()
    for part in ("rank", " ", str(state.process_index), "\\n"):
        for rank in range(2):
            state.wait_for_everyone()
            if rank == state.process_index:
                sys.stdout.write(part)
    sys.stderr.write(f"end {state.process_index}")
notebook_launcher(write_by_turns, num_processes=2)
"""
CHILDREN = "print(len(psutil.Process().children(recursive=True)))"


class Kernel:
    """A kernel, and what its cells print."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, cell: str) -> str:
        """Run a cell, and return what it printed."""
        self.client.execute(cell)
        printed, error = self.collect()
        assert error is None, error
        return printed

    def collect(self, until: str | None = None) -> tuple[str, str | None]:
        """Return what the cell that runs prints, until its end or some text, and the name of its error."""
        printed, error, ends = "", None, time.monotonic() + LIMIT
        while until is None or printed.count(until) < 2:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=ends - time.monotonic())
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        return printed, error


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore")  # of the client, whose kernel is another process
def test_cells_launch_twice_and_an_interrupt_stops_the_processes() -> None:
    kernel = Kernel()
    try:
        kernel.client.wait_for_ready(timeout=LIMIT)
        kernel.run(SETUP)
        for _ in range(2):
            assert kernel.run(LAUNCH) == "['rank 0!', 'rank 1!'] [2, 2]\n"
        printed = kernel.run(LINES)
        assert "rank 0\n" in printed  # not "rankrank  01"
        assert "rank 1\n" in printed
        assert "end 0" in printed  # at the end without a new line
        kernel.client.execute("notebook_launcher(lambda: wait('ready'), num_processes=2)")
        kernel.collect(until="ready")
        kernel.manager.interrupt_kernel()
        assert kernel.collect()[1] == "KeyboardInterrupt"
        assert kernel.run(CHILDREN) == "0\n"
        assert kernel.run(LAUNCH) == "['rank 0!', 'rank 1!'] [2, 2]\n"
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
