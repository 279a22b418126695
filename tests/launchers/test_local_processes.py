"""A launch on one machine by a launcher without torch: its store is served by a process of its own."""

import contextlib
import importlib.metadata
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launched import PYTHON_PATH, run_launched
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import WorldError
from trainer_lib.launchers.elastic import run_elastic
from trainer_lib.launchers.launch_plan import Plan
from trainer_lib.launchers.local import store_server
from trainer_lib.launchers.local.local_processes import run_local
from trainer_lib.launchers.local.local_store import LocalStore

pytestmark = pytest.mark.launch

COMMAND = [sys.executable, "-m", "trainer_lib.commands.main", "launch", "--cpu"]

# What a rank sees of its launcher and of the launcher's other children.
LOOK = """
import os
from pathlib import Path

def maps(process): return Path(f"/proc/{process}/maps").read_text()

def children(process): return Path(f"/proc/{process}/task/{process}/children").read_text().split()

def words(process): return Path(f"/proc/{process}/cmdline").read_text().split(chr(0))

launcher = os.getppid()
[server] = [child for child in children(launcher) if "store_server.py" in " ".join(words(child))]
"""
JOIN = """
import torch
from trainer_lib import PartialState

state = PartialState()
total = state.group.all_reduce(torch.tensor([1.0 + state.process_index])).item()
"""


@pytest.mark.slow
def test_a_launcher_without_torch_starts_ranks_that_form_a_world(tmp_path: Path) -> None:
    script = (
        LOOK
        + JOIN
        + 'print(total, "libtorch" in maps(launcher), "libtorch" in maps(server), "--whole-torch" in words(server))'
    )
    done = run_launched(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "3.0 False True False\n" * 2), done.stderr


@pytest.mark.slow
def test_the_store_of_a_single_process_is_served_once_it_connects(tmp_path: Path) -> None:
    script = (
        LOOK
        + """
print("libtorch" in maps(server))
import torch.distributed as dist

dist.init_process_group("gloo")
print("libtorch" in maps(server), dist.get_world_size())
dist.destroy_process_group()
"""
    )
    done = run_launched(script, tmp_path, num_processes=1)
    assert (done.returncode, done.stdout) == (0, "False\nTrue 1\n"), done.stderr


@pytest.mark.slow
def test_processes_meet_in_a_world_again_after_a_restart(tmp_path: Path) -> None:
    script = (
        JOIN
        + """
import os

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and state.is_last_process:
    raise ValueError("the first time")
state.wait_for_everyone()
print(attempt, total)
"""
    )
    done = run_launched(script, tmp_path, options=["--max_restarts", "1"])
    assert (done.returncode, done.stdout) == (0, "1 3.0\n" * 2), done.stderr
    assert "Process 1 of 2 failed with exit code 1.\n" in done.stderr
    assert "Starting all processes again (restart 1 of 1).\n" in done.stderr


@pytest.mark.slow
def test_the_store_outlives_a_ctrl_c_that_the_processes_wait_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        JOIN
        + """
import signal
import threading
import torch.distributed as dist

interrupted = threading.Event()
signal.signal(signal.SIGINT, lambda *_: interrupted.set())
print("ready", flush=True)
while not interrupted.wait(timeout=0.05):  # another thread may have been interrupted, which wakes nobody
    pass
group = dist.new_group([0, 1])  # which takes the store
dist.barrier(group)
print("saved", flush=True)
"""
    )
    with subprocess.Popen(
        [*COMMAND, "--num_processes", "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=paths(),
        start_new_session=True,
    ) as launch:
        assert launch.stdout is not None
        assert launch.stderr is not None
        assert [launch.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        os.killpg(launch.pid, signal.SIGINT)  # as a terminal does
        out, err = launch.communicate(timeout=60)
    assert (launch.returncode, out) == (130, "saved\n" * 2), err


@pytest.mark.slow
def test_the_server_imports_all_of_torch_if_its_compiled_part_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C" and "--whole-torch" not in sys.orig_argv:
            raise ImportError("no such library")

sys.meta_path.insert(0, Refuse())
"""
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, store_server.__file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    with server:
        assert server.stdin is not None
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("name", "value")
        assert store.get("name") == b"value"
        assert "--whole-torch" in Path(f"/proc/{server.pid}/cmdline").read_text()
        server.stdin.close()  # as the end of the launcher does
        assert server.wait(30) == 0


@pytest.mark.slow
def test_a_launch_ends_if_its_store_dies(tmp_path: Path) -> None:
    script = (
        LOOK
        + """
import signal, time

def save(number, frame):
    print("saved", flush=True)
    os._exit(143)

signal.signal(signal.SIGTERM, save)
os.kill(int(server), signal.SIGKILL)
time.sleep(100)  # as a process that connects
"""
    )
    done = run_launched(script, tmp_path, num_processes=1, timeout=60)
    assert (done.returncode, done.stdout) == (1, "saved\n")
    assert "The process that serves the store, where the ranks meet, was killed by SIGKILL" in done.stderr


def test_a_launcher_with_more_than_1024_open_files(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limit[1]), limit[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        for _ in range(1100):
            stack.enter_context(open(os.devnull))  # noqa: PTH123
        run_local([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"], Plan(num_processes=1))
    assert (tmp_path / "ran").is_file()


def test_processes_are_told_what_torchs_agent_tells_them(tmp_path: Path) -> None:
    program = "import json, os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))"
    plan = Plan(num_processes=2, max_restarts=3, rdzv_id="a-run", role="trainer")
    folder = tmp_path / "$HOME ${local_rank}"
    folder.mkdir()
    for name, run in (("local", lambda words: run_local(words, plan)), ("agent", lambda words: by_agent(words, plan))):
        run([sys.executable, "-c", program, str(folder / name)])
    for rank in range(2):
        local, agent = (json.loads((folder / f"{name}{rank}").read_text()) for name in ("local", "agent"))
        assert not agent.keys() - local.keys() - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        different = {name for name in local if local[name] != agent.get(name)}
        assert different <= {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TRAINER_LIB_KILLS_STOPPED_RANKS"}
        assert local["RANK"] == local["LOCAL_RANK"] == str(rank)


def by_agent(words: list[str], plan: Plan) -> None:
    """Run a program under torch's agent."""
    run_elastic(words[0], words[1:], plan)


FAILS_AND_HANGS = """
import os, signal, sys
from pathlib import Path

def note(*_): Path(sys.argv[1], f"1{os.environ['RANK']}").touch()

signal.signal(signal.SIGTERM, note)  # it does not end, as a process that waits in a collective
Path(sys.argv[1], os.environ["RANK"]).touch()
if os.environ["RANK"] == "0":
    while True:
        signal.pause()
while not Path(sys.argv[1], "0").exists():
    pass
"""


@pytest.mark.slow
def test_a_signal_to_the_launcher_after_a_failure_is_not_answered_by_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_AND_HANGS + "os._exit(5)")
    command = [*COMMAND, "--num_processes", "2", "--max_restarts", "1", str(script), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=paths()) as launch:
        await_files(tmp_path, 3)  # the launcher has told rank 0 to end, and gives it three seconds
        launch.terminate()
        _, err = launch.communicate(timeout=30)
    assert launch.returncode == 128 + signal.SIGTERM
    assert "Starting all processes again" not in err
    assert "Ended by SIGTERM" in err


ENDS_AFTER_AN_INTERRUPTION = """
import os, sys, time
from pathlib import Path

if os.environ["RANK"] == "0":
    os._exit(143)
parent = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
while len(parent.read_text().split()) > int(sys.argv[1]):  # until the launcher has seen the end of rank 0
    time.sleep(0.01)
"""


# The options, and the children that a launcher has then besides rank 0: rank 1, and without torch's agent the store.
LAUNCHERS = [pytest.param([], 2, id="local"), pytest.param(["--tee", "3"], 1, id="torch's agent")]


@pytest.mark.parametrize(("options", "children"), LAUNCHERS)
@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("raise ValueError('a peer is gone')", 143)])
def test_an_exit_code_of_an_error_beats_an_interruption(
    tmp_path: Path, options: list[str], children: int, end: str, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_AFTER_AN_INTERRUPTION + end)
    command = [*COMMAND, "--num_processes", "2", "--max_restarts", "1", *options, str(script), str(children)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=paths(), timeout=60)
    assert done.returncode == code, done.stderr
    assert "Starting all processes again" not in done.stderr
    report = "Process 1 of 2 failed with exit code 3.\nAfter that, process 0 failed with exit code 143."
    assert (report in done.stderr) == (code == 3)


FAILS_BESIDE_ONE_THAT_SAVES = """
import os, signal, sys
from pathlib import Path

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # as a run that saves and ends
    Path(sys.argv[1], "ready").touch()
    while True:
        signal.pause()
while not Path(sys.argv[1], "ready").exists():
    pass
"""


@pytest.mark.parametrize("options", [[], ["--tee", "3"]], ids=["local", "torch's agent"])
@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("raise ValueError('first')", 1)])
def test_processes_that_the_launcher_ends_do_not_hide_the_failure(
    tmp_path: Path, options: list[str], end: str, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_BESIDE_ONE_THAT_SAVES + end)
    command = [*COMMAND, "--num_processes", "2", *options, str(script), str(tmp_path)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=paths(), timeout=60)
    assert done.returncode == code, done.stderr
    assert f"Process 1 of 2 failed with exit code {code}." in done.stderr


HANGS_TOGETHER = """
import os, signal, sys
from pathlib import Path
from trainer_lib.processes.failure_record import record_failure

signal.signal(signal.SIGTERM, lambda *_: os._exit(70))
ready = Path(sys.argv[1], "ready")
while os.environ["RANK"] == "0" and not ready.exists():
    pass
record_failure("HangError", "rank 0 hangs")
if os.environ["RANK"] == "0":
    os._exit(70)
ready.touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("options", [[], ["--tee", "3"]], ids=["local", "torch's agent"])
def test_a_process_that_ends_a_moment_after_another_keeps_its_exit_code(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS_TOGETHER)
    command = [*COMMAND, "--num_processes", "2", *options, str(script), str(tmp_path)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=paths(), timeout=60)
    assert done.returncode == 70
    assert "Process 1 of 2 failed with exit code 70.\nAfter that, process 0 raised HangError" in done.stderr


LEAVES_A_CHILD = """
import os, signal, subprocess, sys
from pathlib import Path

if os.environ["RANK"] == "0":
    signal.pause()
child = subprocess.Popen(["sleep", "60"])
Path(sys.argv[1], "child").write_text(str(child.pid))
os.kill(os.getpid(), int(sys.argv[2])) if len(sys.argv) > 2 else os._exit(3)
"""


@pytest.mark.parametrize("options", [[], ["--tee", "3"]], ids=["local", "torch's agent"])
@pytest.mark.parametrize("end", [[], ["9"]], ids=["exit", "kill"])
def test_a_process_that_fails_leaves_no_children(tmp_path: Path, options: list[str], end: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_A_CHILD)
    command = [*COMMAND, "--num_processes", "2", *options, str(script), str(tmp_path), *end]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=paths(), timeout=60)
    child = Path("/proc", (tmp_path / "child").read_text(), "cmdline")
    ends = time.monotonic() + 5
    while child.exists() and child.read_bytes() and time.monotonic() < ends:  # an ended process has no words
        time.sleep(0.01)
    assert done.returncode == (137 if end else 3)
    assert not child.exists() or not child.read_bytes()


@pytest.mark.parametrize("script", ["print('a line')", "import sys; sys.stdout.close(); raise ValueError('an error')"])
def test_a_process_whose_output_is_closed_has_one_error(tmp_path: Path, script: str) -> None:
    (tmp_path / "script.py").write_text(script)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, str(tmp_path / "script.py")]
    done = subprocess.run(
        command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True, env=paths(), timeout=60
    )
    os.close(writer)
    assert done.returncode == 1, done.stderr
    assert "During handling of the above exception" not in done.stderr


PRINTS_AND_WAITS = """
import sys, time
from pathlib import Path

print("ready", flush=True)
ends = time.monotonic() + 60
while not Path(sys.argv[1], "read").exists():
    assert time.monotonic() < ends, "nobody read the line"
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_lines_of_tee_arrive_in_a_pipe_while_the_processes_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINTS_AND_WAITS)
    command = [*COMMAND, "--num_processes", "1", "--tee", "3", str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=paths()) as launch:
        assert launch.stdout is not None
        assert launch.stdout.readline() == "[default0]:ready\n"
        (tmp_path / "read").touch()
        _, err = launch.communicate(timeout=60)
    assert launch.returncode == 0, err


@pytest.mark.slow
def test_a_second_signal_ends_processes_that_ignore_the_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_AND_HANGS + "while True: signal.pause()")
    command = [*COMMAND, "--num_processes", "2", "--shutdown_timeout", "60", str(script), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=paths()) as launch:
        await_files(tmp_path, 2)
        launch.terminate()
        await_files(tmp_path, 4)
        launch.terminate()  # the same request once more
        time.sleep(1.5)
        assert launch.poll() is None
        launch.terminate()
        assert launch.wait(30) == 128 + signal.SIGTERM


def await_files(folder: Path, number: int) -> None:
    """Wait until the ranks have written their files: one each, and one each at SIGTERM."""
    ends = time.monotonic() + 60
    while len([path for path in folder.iterdir() if path.name.isdigit()]) < number:
        assert time.monotonic() < ends
        time.sleep(0.01)


def paths() -> Mapping[str, str]:
    """Return the environment of interpreters that are to find the library."""
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}


ASK = "from trainer_lib.launchers.local.torch_build import has_no_accelerators; print(has_no_accelerators())"


@pytest.mark.parametrize(
    ("build", "backend", "has_none"),
    [
        ({"cuda": None, "hip": None, "xpu": None}, False, True),
        ({"cuda": "13.0", "hip": None, "xpu": None}, False, find_library("cuda") is None),
        ({"cuda": None, "hip": "7.0", "xpu": None}, False, False),
        ({"cuda": None, "hip": None, "xpu": None}, True, False),  # such as torch_npu
        ({}, False, False),
    ],
)
def test_accelerators_of_a_torch_that_is_not_imported(
    tmp_path: Path, build: Mapping[str, str | None], backend: bool, has_none: bool
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "version.py").write_text("".join(f"{name} = {value!r}\n" for name, value in build.items()))
    if backend:
        described = tmp_path / "torch_npu-1.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    elif importlib.metadata.entry_points(group="torch.backends"):
        pytest.skip("another backend of torch is installed here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHON_PATH])}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == f"{has_none}\n", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log_dir", "file/logs"], "log_dir cannot be written: Not a directory (file/logs)."),
        (
            ["--log_dir", "logs", "--rdzv_id", "a/b"],
            "rdzv_id must be a name without '/', as folders get it (got 'a/b').",
        ),
    ],
)
def test_log_folders_that_cannot_be_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "script.py").touch()
    assert main(["launch", "--cpu", *options, "script.py"]) == 2
    assert capfd.readouterr().err == f"trainer-lib launch: error: {message}\n"


def test_a_log_folder_that_is_a_file_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").touch()
    (tmp_path / "script.py").touch()
    assert main(["launch", "--cpu", "--log_dir", str(tmp_path / "logs"), str(tmp_path / "script.py")]) != 0
    assert "log_dir must be a folder" in capfd.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="takes another user's rights")
def test_a_port_that_the_user_may_not_use_is_named_with_the_reason() -> None:
    start = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if int(start.read_text()) < 2:
        pytest.skip("every user may use every port here")
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            LocalStore(1)
        except WorldError as error:
            os._exit(0 if str(error).startswith("Port 1 cannot be used: Permission denied.") else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
