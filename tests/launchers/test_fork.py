"""A function on several forked processes."""

import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.processes.exit_codes import Interrupted, by_signal
from trainer_lib.processes.proc_stat import began_at, is_exiting
from trainer_lib.state import PartialState
from trainer_lib.testing import reset_states, run_processes

LIMIT = 60.0
_EXIT = {"x86_64": 60, "aarch64": 93}  # numbers of the system call that ends one thread


def total_rank() -> float:
    state = PartialState()
    return state.group.all_reduce(torch.tensor([float(state.process_index)])).item()


def train(steps: int = 3, workers: int = 2) -> float:
    """A loop with a parallel region, a backward and a loader with worker processes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    data = TensorDataset(torch.randn(64 * steps, 64))
    loss = torch.zeros(())
    for (batch,) in DataLoader(data, batch_size=64, num_workers=workers):
        loss = model(batch).square().mean()
        loss.backward()
    return loss.item()


def test_closures_run_in_one_world_and_results_come_in_order_of_rank() -> None:
    offset = 10

    def place(factor: int) -> tuple[int, int, float]:
        state = PartialState()
        return offset + factor * state.process_index, state.num_processes, total_rank()

    assert run_forked(place, (2,), num_processes=3, timeout=LIMIT) == [(10, 3, 3.0), (12, 3, 3.0), (14, 3, 3.0)]


def test_error_of_one_process_is_told_first_and_nobody_hangs() -> None:
    def fail_on_the_last() -> None:
        state = PartialState()
        state.wait_for_everyone()
        if state.is_last_process:
            raise KeyError("only here")
        state.wait_for_everyone()

    with pytest.raises(
        ProcessFailedError, match=r"\AProcess 1 of 2 failed with exit code 1\.\n(.|\n)*Traceback"
    ) as caught:
        run_forked(fail_on_the_last, timeout=LIMIT)
    assert "KeyError: 'only here'" in str(caught.value)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_process_killed_by_a_signal_is_named_before_those_that_lost_it() -> None:
    def die_on_the_last() -> None:
        state = PartialState()
        state.wait_for_everyone()
        if state.is_last_process:
            os.kill(os.getpid(), signal.SIGKILL)
        state.wait_for_everyone()

    with pytest.raises(ProcessFailedError, match="Process 1 of 2 was killed by SIGKILL") as caught:
        run_forked(die_on_the_last, timeout=LIMIT)
    assert caught.value.exit_code == 128 + signal.SIGKILL


def test_process_killed_is_named_though_it_ends_after_those_that_lost_it(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    def die_slowly() -> None:
        if os.environ["RANK"] == "0":
            while not closed.exists():
                pass
            raise ConnectionResetError
        os.closerange(3, 1000)  # the first that a process does that is killed, which others notice
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # ends the process, by a signal
        closed.touch()
        signal.pause()

    with pytest.raises(ProcessFailedError, match="Process 1 of 2 was killed by SIGALRM"):
        run_forked(die_slowly, timeout=LIMIT)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say that a process is ending")
def test_process_that_the_kernel_is_ending_is_named_before_those_that_lost_it(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"

    def end() -> None:
        while not is_exiting(os.getpid()):
            pass
        noticed.touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_slowly() -> None:
        if os.environ["RANK"] == "0":
            while not noticed.exists():
                pass
            raise ConnectionResetError
        threading.Thread(target=end).start()
        # Ends the main thread; the process ends with the other one. Unlike pthread_exit, it unwinds no stack, for which
        # a fork may have left a lock taken.
        ctypes.CDLL(None).syscall(_EXIT[platform.machine()], 0)

    with pytest.raises(ProcessFailedError, match="Process 1 of 2 was killed by SIGKILL"):
        run_forked(die_slowly, timeout=LIMIT)


def test_process_that_fails_ends_though_a_thread_of_its_own_waits() -> None:
    def fail_beside_a_thread() -> None:
        import threading

        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("leave the thread behind")

    with pytest.raises(ProcessFailedError, match="leave the thread behind"):
        run_forked(fail_beside_a_thread, timeout=LIMIT)


@pytest.mark.slow
def test_hung_processes_are_ended_and_say_where_they_were() -> None:
    def wait_for_nobody() -> None:
        state = PartialState()
        if state.is_main_process:
            state.wait_for_everyone()
        signal.pause()

    with pytest.raises(ProcessFailedError, match=r"did not end within 3 seconds: 0, 1\.") as caught:
        run_forked(wait_for_nobody, timeout=3)
    assert "in wait_for_everyone" in str(caught.value)
    assert str(caught.value).count("in wait_for_nobody") == 2
    assert caught.value.exit_code == 124


def test_forks_train_after_the_parent_has_trained() -> None:
    torch.set_num_threads(2)  # so that the parent has threads which the forks do not
    before = train()

    def train_together() -> tuple[float, float]:
        return train(), total_rank()

    assert run_forked(train_together, timeout=LIMIT) == [(pytest.approx(before), 1.0)] * 2
    assert train() == before  # and the parent still can
    torch.set_num_threads(1)


def test_forks_do_not_tear_down_what_the_parent_left(capfd: pytest.CaptureFixture[str]) -> None:
    class Connection:
        """Something that its end would close for the parent too, and that only the garbage collector finds."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            os.write(1, b"closed ")

    gc.disable()
    try:
        Connection()
        run_forked(gc.collect, timeout=LIMIT)
        assert capfd.readouterr().out == ""
    finally:
        gc.enable()
    gc.collect()
    assert capfd.readouterr().out == "closed "


def test_lone_state_of_the_parent_is_not_inherited() -> None:
    reset_states()
    assert PartialState(cpu=True).num_processes == 1
    assert run_processes(total_rank, 2) == [1.0, 1.0]
    assert PartialState().num_processes == 1
    reset_states()


def test_parent_that_is_in_a_world_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match="Create the Accelerator inside the launched function"):
            run_forked(total_rank)
    finally:
        dist.destroy_process_group()


def test_output_of_the_processes_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(well: bool) -> None:
        print("a word from", os.environ["RANK"])
        assert well

    run_forked(speak, (True,), timeout=LIMIT)
    with pytest.raises(ProcessFailedError):
        run_forked(speak, (False,), num_processes=1, timeout=LIMIT)
    words = capfd.readouterr().out.splitlines()
    assert sorted(words) == ["a word from 0", "a word from 0", "a word from 1"]


def test_processes_print_into_nothing_where_the_parent_has_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> int:
        print("told")
        return PartialState().process_index

    monkeypatch.setattr(sys, "stdout", None)  # as in a service that has closed it
    assert run_forked(tell, num_processes=2, timeout=LIMIT) == [0, 1]


def test_processes_with_any_name_are_looked_up() -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) caf\\xc3'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert began_at(process.pid).isdecimal()
        assert not is_exiting(process.pid)
        process.communicate()


def test_exit_code_is_that_of_the_interruption_where_the_parent_has_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise Interrupted(by_signal(signal.SIGTERM))

    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ProcessFailedError) as caught:
        run_forked(interrupt, num_processes=1, timeout=LIMIT)
    assert caught.value.exit_code == 143


def test_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(ProcessFailedError, match=r"Process 0 of 1 failed with exit code 1\.\n(.|\n)*lambda"):
        run_forked(lambda: lambda: 0, num_processes=1, timeout=LIMIT)


def test_process_that_ends_before_its_function_does_is_told() -> None:
    with pytest.raises(ProcessFailedError, match=r"Process 0 of 1 ended without a result \(exit code 0\)\."):
        run_forked(os._exit, (0,), num_processes=1, timeout=LIMIT)


@pytest.mark.slow
@pytest.mark.launch
def test_processes_do_not_outlive_their_parent(tmp_path: Path) -> None:
    parent = """
import signal
from trainer_lib.launchers import run_forked

def wait():
    print("here", flush=True)
    signal.pause()

run_forked(wait)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where it leaves its folder
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(2)]
        process.kill()
        assert process.stdout.read() == ""  # it ends when the last process does
    assert begun == ["here\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": 3}, r"function must be callable \(got 3\)"),
        ({"args": "text"}, r"args must be a tuple \(got 'text'\). For one argument: args=\(value,\)"),
        ({"num_processes": 0}, "num_processes must be a whole number of at least 1, got 0"),
        ({"timeout": -1.0}, "timeout must be a finite number above 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"function": total_rank, **arguments}
    with pytest.raises(ConfigurationError, match=message):
        run_forked(**settings)
