"""`trainer-lib launch --mpirun_hostfile`: mpirun starts the processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launched import ROOT
from trainer_lib.commands.main import main
from trainer_lib.launchers import bootstrap
from trainer_lib.processes.exit_codes import SAME_REQUEST

SCRIPT = """
import sys, os
from pathlib import Path
import torch
from trainer_lib import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum").item()
facts = [accelerator.num_processes, accelerator.state.launcher, total, accelerator.mixed_precision]
lines = [*facts, os.environ["CCL_WORKER_COUNT"], *sys.argv[1:]]
Path(f"rank_{accelerator.process_index}").write_text("|".join(map(str, lines)))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_LIB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def provide(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Put an mpirun into the PATH that says who it is."""
    (folder / "mpirun").write_text(f'#!/bin/bash\necho "{version}"\n')
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("mpirun (Open MPI) 4.1.4", ["--hostfile", "hosts", "-np", "4", "--map-by", "ppr:2:node", "-x"]),
        ("HYDRA build details: Version: 4.0.2", ["-f", "hosts", "-n", "4", "-ppn", "2", "-genvlist"]),
    ],
)
def test_the_command_of_each_mpi(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    place: list[str],
) -> None:
    provide(folder, monkeypatch, version)
    machines = ["--num_machines", "2", "--num_processes", "4", "--mpirun_hostfile", "hosts", "--mpirun_ccl", "2"]
    assert main(["launch", "--dry_run", "--cpu", "--main_process_ip", "10.0.0.1", *machines, "train.py", "a b"]) == 0
    printed = capsys.readouterr().out
    command = printed.splitlines()[-2].split()
    assert command[1 : len(place) + 1] == place
    assert printed.splitlines()[-2].endswith(f"{sys.executable} {bootstrap.__file__} mpirun train.py 'a b'")
    for variable in ("ACCELERATE_USE_CPU", "CCL_WORKER_COUNT", "MASTER_ADDR", "OMP_NUM_THREADS"):
        assert variable in printed.splitlines()[-2]
    assert "  MASTER_ADDR=10.0.0.1\n" in printed
    assert "  CCL_WORKER_COUNT=2\n" in printed


@pytest.mark.parametrize(
    ("version", "words", "message"),
    [
        ("Open MPI", ["--mpirun_hostfile=none", "train.py"], "The hostfile 'none' is not there."),
        (
            "Open MPI",
            ["--mpirun_hostfile=hosts", "--max_restarts=2", "train.py"],
            "max_restarts (--max_restarts) has no effect with",
        ),
        ("Open MPI", ["--mpirun_hostfile=hosts", "--mpirun_ccl=0", "train.py"], "mpirun_ccl must be a whole number of"),
        ("Other MPI 1", ["--mpirun_hostfile=hosts", "train.py"], "`mpirun --version` says 'Other MPI 1'"),
        ("", ["--mpirun_hostfile=hosts", "train.py"], "There is no program mpirun here."),
    ],
)
def test_what_is_wrong_is_an_error(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    words: list[str],
    message: str,
) -> None:
    if version:
        provide(folder, monkeypatch, version)
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "--cpu", "--num_processes=2", *words]) == 2
    assert message in capsys.readouterr().err


def launched(folder: Path, *words: str) -> "subprocess.Popen[str]":
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed (Debian: openmpi-bin)")
    (folder / "mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainer_lib",
            "launch",
            "--cpu",
            "--num_processes=2",
            "--mpirun_hostfile=hosts",
            *words,
        ],
        env={**os.environ, **root, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.launch
def test_a_real_mpirun_starts_the_world(folder: Path) -> None:
    process = launched(folder, "--mixed_precision=bf16", "--mpirun_ccl=3", "train.py", "a b", "$HOME")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    for rank in range(2):
        assert (folder / f"rank_{rank}").read_text() == "2|mpirun|3.0|bf16|3|a b|$HOME", output


@pytest.mark.slow
@pytest.mark.launch
def test_signals_and_exit_codes_pass_through_mpirun(folder: Path) -> None:
    (folder / "train.py").write_text("import sys; sys.exit(7)")
    process = launched(folder, "train.py")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 7, output
    (folder / "mpirun").unlink()
    (folder / "train.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\n"
        "Path(f'ready_{os.environ[\"OMPI_COMM_WORLD_RANK\"]}').touch()\ntime.sleep(100)\n"
    )
    process = launched(folder, "train.py")
    assert files(folder, "ready_*") == 2
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output


SAVES = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["OMPI_COMM_WORLD_RANK"]
def save(number, frame):
    Path(f"asked_{rank}").touch()
    time.sleep(float(sys.argv[1]))
    Path(f"saved_{rank}").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
Path(f"ready_{rank}").touch()
time.sleep(100)
"""


def files(folder: Path, pattern: str) -> int:
    """Return how many files there are, after a wait for those of two ranks."""
    ends = time.monotonic() + 60
    while (count := len(list(folder.glob(pattern)))) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    return count


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_have_time_to_save(folder: Path, number: signal.Signals) -> None:
    """Open MPI itself kills them after two seconds."""
    (folder / "train.py").write_text(SAVES)
    process = launched(folder, "train.py", "4")
    assert files(folder, "ready_*") == 2
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    assert len(list(folder.glob("saved_*"))) == 2, output


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("is_asked_twice", [False, True], ids=["shutdown_timeout", "a second signal"])
def test_ranks_that_do_not_end_are_killed(folder: Path, is_asked_twice: bool) -> None:
    (folder / "train.py").write_text(SAVES)
    process = launched(folder, f"--shutdown_timeout={60 if is_asked_twice else 1}", "train.py", "50")
    assert files(folder, "ready_*") == 2
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert files(folder, "asked_*") == 2
    if is_asked_twice:
        time.sleep(SAME_REQUEST + 0.5)  # a launcher may send one request to a rank and to its group
        process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 20
    assert process.returncode == 143, output
    assert not list(folder.glob("saved_*"))


@pytest.mark.slow
@pytest.mark.launch
def test_a_rank_that_fails_while_it_saves_is_a_failure(folder: Path) -> None:
    (folder / "train.py").write_text(SAVES.replace("128 + number", "1"))
    process = launched(folder, "train.py", "0")
    assert files(folder, "ready_*") == 2
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
