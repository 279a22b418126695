"""Hang detection: the error names the rank that hangs and where; a rank that waits for a slow one is not hung."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from tests.launched import PYTHON_PATH, run_as_script, run_launched
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, PartialState
from trainer_lib.events import Modifier, Run
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.launchers.forked_process import begin
from trainer_lib.processes.ports import free_port
from trainer_lib.trainer.safety.hang_watchdog import EXIT_CODE

TIMEOUT = 2.0

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.trainer.tasks import arguments, points, trainer

folder, how = Path(sys.argv[1]), sys.argv[2]


class Points:
    def __init__(self):
        self.inputs, self.sides = points(200)

    def __len__(self):
        return 200

    def __getitem__(self, place):
        once = folder / "hung"
        if place == 155 and not once.exists():
            once.write_text(str(time.time()))
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()
        return self.inputs[place], self.sides[place]


args = arguments(
    output_dir=folder / "runs", resume="auto", save_every=3, shuffle=False, num_train_epochs=1, hang_timeout=TIMEOUT
)
result = trainer(args, train_dataset=Points()).fit()
print("finished at", result.state.step)
""".replace("TIMEOUT", str(TIMEOUT))


def launched(folder: Path, how: str, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Return how a job of two processes ended, and how many seconds after one of them hung."""
    done = run_launched(SCRIPT, folder, str(folder), how, options=options, variables={"OMP_NUM_THREADS": "1"})
    return done, time.time() - float((folder / "hung").read_text())


class Waits(Modifier):
    """Has one rank wait in the middle of the run, once."""

    def __init__(self, once: Path) -> None:
        self.once = once

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 4 and not run.is_main_process and not self.once.exists():
            self.once.touch()
            threading.Event().wait()


@pytest.mark.fault
def test_a_rank_that_waits_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    def train() -> int:
        rank = PartialState(cpu=True).process_index
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"error-{rank}.json")
        options: dict[str, Any] = {"save_every": 3, "save_in_background": False}  # it is there when the rank hangs
        args = arguments(output_dir=tmp_path / "runs", resume="auto", max_steps=6, hang_timeout=1.0, **options)
        return trainer(args, train_dataset=points(80), callbacks=[Waits(tmp_path / "once")]).fit().state.step

    with pytest.raises(ProcessFailedError) as caught:
        run_forked(train, timeout=60)
    assert caught.value.exit_code == EXIT_CODE
    errors = [json.loads(path.read_text())["message"]["message"] for path in tmp_path.glob("error-*.json")]
    assert errors
    for error in errors:
        assert error.startswith("HangError: No rank has made progress for 1 s (hang_timeout=1): rank 1 hangs.")
        assert "rank 0 is in step 5, in " in error
        assert "rank 1 is in step 5, in Event.wait (threading.py:" in error or "Condition.wait" in error
        assert "Waits.on_step_begin (test_hang_watchdog.py:" in error
    assert any("on_step_begin" in path.read_text() for path in tmp_path.glob("runs/*/hang-process-*.txt"))
    assert run_forked(train, timeout=60) == [6, 6]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("`SIGSTOP` to one of two processes")
def test_a_process_that_was_stopped_is_named(tmp_path: Path) -> None:
    done, seconds = launched(tmp_path, "stopped")
    assert done.returncode == EXIT_CODE
    assert f"(hang_timeout={TIMEOUT:g}): rank 1 hangs." in done.stderr
    assert "rank 0 is in step 10, in HostMessage.reduce (bucket_message.py:" in done.stderr
    assert "rank 1 was last heard of in step " in done.stderr
    (stacks,) = tmp_path.glob("runs/*/hang-process-*.txt")
    assert "in reduce" in stacks.read_text()
    assert seconds < TIMEOUT + 15  # of which the launcher waits for a process that cannot answer; the machine is busy


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a rank that hangs; the launcher restarts")
def test_a_job_that_hung_goes_on_where_it_was(tmp_path: Path) -> None:
    done, _ = launched(tmp_path, "waits", "--max_restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "rank 1 hangs." in done.stderr
    assert "rank 1 is in step 10, in Event.wait (threading.py:" in done.stderr or "Condition.wait" in done.stderr
    assert "Points.__getitem__ (script.py:" in done.stderr
    assert "Starting all processes again (restart 1 of 1)" in done.stderr
    assert done.stdout.count("finished at 13") == 2


ALONE = """
import os, signal, sys, threading, time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tests.trainer.tasks import arguments, network, points
from trainer_lib import Callback, Trainer
from trainer_lib.tensor_files.file_contents import Tensors

folder, how, hangs_on = Path(sys.argv[1]), sys.argv[2], os.environ.get("HANGS", "0")
is_hung = os.environ.get("RANK", "0") == hangs_on


def hang():
    Path(folder, "hung").write_text(str(time.time()))
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how.startswith("spins"):
        pass
    threading.Event().wait()


class Points:
    def __init__(self):
        self.inputs, self.sides = points(400)

    def __len__(self):
        return 400

    def __getitem__(self, place):
        if is_hung and place >= 80 and how in ("stopped", "waits", "worker", "spins"):
            hang()
        return self.inputs[place], self.sides[place]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, inputs):
        self.calls += 1
        if is_hung and self.calls == 6 and how == "spins in the model":
            hang()
        return self.inner(inputs)


class HangsAtTheEnd(Callback):
    def on_fit_end(self, run):
        if is_hung and how == "end":
            hang()


class Loads(Trainer):
    def train_dataloader(self):
        if is_hung and how == "loader":
            hang()
        return super().train_dataloader()


write = Tensors.write
if how == "save" and is_hung:
    Tensors.write = lambda self, path: hang() if "00000006" in str(path) else write(self, path)
args = arguments(
    output_dir=folder / "runs", save_every=3, shuffle=False, num_train_epochs=1, hang_timeout=TIMEOUT,
    num_workers=1 if how == "worker" else 0,
)
data = {"train_dataset": Points(), "loss_fn": cross_entropy}
Loads(Network(), args, **data, callbacks=[HangsAtTheEnd()]).fit()
""".replace("TIMEOUT", str(TIMEOUT))


def started(folder: Path, how: str, ranks: int = 2, hangs: int = 0) -> tuple[list[int], list[str], float]:
    """Start the ranks of a run by environment variables alone; return their exit codes, errors, and the time taken."""
    script = folder / "script.py"
    script.write_text(ALONE)
    errors = [folder / f"errors-{rank}" for rank in range(ranks)]
    files = [path.open("wb") for path in errors]
    # A run that does not wait for a save leaves that to the end of its interpreter, the watchdog ends without it.
    start, port = _interpreter if how == "save" else _Fork, free_port()
    processes = [
        start([str(script), str(folder), how], _variables(rank, ranks, port, hangs), files[rank])
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=90) for process in processes]
    finally:
        for process, file in zip(processes, files, strict=True):
            process.kill()
            process.wait()
            file.close()
    seconds = time.time() - float((folder / "hung").read_text())
    return codes, [path.read_text() for path in errors], seconds


def _variables(rank: int, ranks: int, port: int, hangs: int) -> dict[str, str]:
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    return {"OMP_NUM_THREADS": "1", "HANGS": str(hangs), **(world if ranks > 1 else {})}


def _interpreter(command: list[str], variables: dict[str, str], errors: BinaryIO) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, **variables}
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, stderr=errors)


class _Fork:
    """The same without importing torch again: a fork of this process, which no launcher watches either."""

    def __init__(self, command: list[str], variables: dict[str, str], errors: BinaryIO) -> None:
        self._process = get_context("fork").Process(target=self._run, args=(command, variables, errors, os.getpid()))
        self._process.start()

    @staticmethod
    def _run(command: list[str], variables: dict[str, str], errors: BinaryIO, parent: int) -> None:
        os.dup2(errors.fileno(), 2)
        sys.stdout, sys.stderr = open(os.devnull, "w"), open(2, "w", closefd=False)  # noqa: SIM115, PTH123
        begin(parent, variables, threads=1)
        run_as_script(command)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError
        return self._process.exitcode

    def kill(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()


def is_gone(pid: int) -> bool:
    """Whether a process ends in a few seconds."""
    try:
        psutil.Process(pid).wait(5)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        pass
    return True


# The watchdog has five seconds beside the timeout, and a busy machine some more.
MOST = TIMEOUT + 15


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("rank 0 hangs in a run that no launcher started")
@pytest.mark.parametrize("how", ["stopped", "waits"])
def test_ranks_without_a_launcher_end_when_rank_0_hangs(tmp_path: Path, how: str) -> None:
    codes, errors, seconds = started(tmp_path, how)
    assert codes == [-signal.SIGKILL if how == "stopped" else EXIT_CODE, EXIT_CODE]
    output = "".join(errors)
    assert f"(hang_timeout={TIMEOUT:g}): rank 0 hangs." in output
    assert f"rank 0 {'was last heard of' if how == 'stopped' else 'is'} in step " in output
    assert output.count("hangs.") == 1
    assert seconds < MOST


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("`SIGSTOP` to one of two processes of torchrun")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_of_torchrun_is_killed(tmp_path: Path, rank: int) -> None:
    """torchrun itself waits for half a minute; what it names as the cause is the hang, not the kill."""
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    variables = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "HANGS": str(rank)}
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [*command, str(tmp_path), "stopped"], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert "HangError: No rank has made progress for " in cause
    assert f"(hang_timeout=2): rank {rank} hangs." in cause
    assert time.time() - float((tmp_path / "hung").read_text()) < MOST


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a rank in an endless loop")
@pytest.mark.parametrize("how", ["spins", "spins in the model"])
def test_a_rank_that_spins_is_named(tmp_path: Path, how: str) -> None:
    codes, errors, seconds = started(tmp_path, how, hangs=1)
    assert codes == [EXIT_CODE, EXIT_CODE]
    assert ": rank 1 hangs." in errors[0]
    assert "hang (script.py:" in errors[0]
    assert seconds < MOST


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a rank that hangs before the first step, or after the last one")
@pytest.mark.parametrize(("how", "step"), [("loader", "before the first step"), ("end", "after step 25")])
def test_a_rank_that_hangs_before_or_after_the_steps_is_named(how: str, step: str, tmp_path: Path) -> None:
    codes, errors, seconds = started(tmp_path, how)
    assert codes == [EXIT_CODE, EXIT_CODE if how == "loader" else 0]
    assert f"(hang_timeout={TIMEOUT:g}): rank 0 hangs." in "".join(errors)
    assert f"  rank 0 is {step}, in " in "".join(errors)
    assert seconds < MOST


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a data worker that hangs, with one process")
def test_a_data_worker_that_hangs_is_named(tmp_path: Path) -> None:
    (code,), (error,), seconds = started(tmp_path, "worker", ranks=1)
    assert code == EXIT_CODE
    (pid,) = re.findall(r"rank 0 is in step \d+, waits for data worker 0 \(pid (\d+)\), in ", error)
    (stacks,) = tmp_path.glob("runs/*/hang-process-0.txt")
    assert "in __getitem__" in stacks.read_text()
    assert seconds < MOST
    assert is_gone(int(pid))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a save in the background that hangs")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_does_not_wait_for_a_save_that_hangs(tmp_path: Path, ranks: int) -> None:
    codes, errors, seconds = started(tmp_path, "save", ranks)
    assert codes == [1] * ranks, errors  # of an error of the last save, not of the watchdog
    assert "UnsavedError: The run trained all its steps" in errors[0]
    assert re.search(r"checkpoint-00000006 hangs: for \d+ s", errors[0])
    assert "hang (script.py:" in errors[0]
    assert seconds < MOST


class Busy(Modifier):
    """Has one process compute after a step, far longer than the time-out; the others wait for it."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2 and run.is_main_process:
            end = time.monotonic() + 3 * TIMEOUT
            while time.monotonic() < end:
                sum(range(10_000))


class Slow(Modifier):
    """Has all processes sleep, each time for less than the time-out."""

    def on_step_begin(self, run: Run) -> None:
        time.sleep(0.4 * TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("callback", [Busy, Slow])
def test_who_waits_for_one_that_moves_is_left_to_wait(callback: Any) -> None:
    def train() -> int:
        model_trainer = trainer(
            arguments(max_steps=5, hang_timeout=TIMEOUT), train_dataset=points(80), callbacks=[callback()]
        )
        return model_trainer.fit().state.step

    assert run_world(train, (), 2, timeout=60) == [5, 5]


class Looks(Modifier):
    """Sees whether there is a watchdog."""

    is_found: bool | None = None

    def on_step_begin(self, run: Run) -> None:
        self.found = any(thread.name == "watchdog" for thread in threading.enumerate())


def test_nobody_watches_where_it_is_not_wanted() -> None:
    def train(**options: Any) -> tuple[bool | None, bool]:
        looks = Looks()
        trainer(arguments(max_steps=2, **options), callbacks=[looks]).fit()
        return looks.found, any(thread.name == "watchdog" for thread in threading.enumerate())

    assert (train(hang_timeout=None), train()) == ((False, False), (True, False))
    assert (
        run_world(lambda: (train(hang_timeout=None), train()), (), 2, timeout=60)
        == [((False, False), (True, False))] * 2
    )


def test_nobody_watches_what_somebody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    looks = Looks()
    trainer(arguments(max_steps=2), callbacks=[looks]).fit()
    assert looks.found is False


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="hang_timeout"):
        arguments(hang_timeout=0)
