"""Launches on two machines: two network namespaces with a cable between them, each with a host name of its own."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launched import PYTHON_PATH
from tests.trainer.safety.test_elastic_restarts import uninterrupted
from tests.worlds import run_world
from trainer_lib.launchers.machine_address import own_address, serves_rendezvous
from trainer_lib.processes.ports import free_port, is_port_in_use

PATIENCE = 120  # seconds

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.safety.test_elastic_restarts import logged_losses
from trainer_lib.events import Callback

class WaitsForTheCut(Callback):
    def on_step_end(self, run):
        if run.state.step == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            Path(f"ready_{os.environ['RANK']}").touch()
            ends = time.monotonic() + 60
            while not Path("is_cut").exists() and time.monotonic() < ends:
                time.sleep(0.01)

model = network(dropout=0.3)
args = arguments(output_dir="runs", resume="auto", num_train_epochs=3, save_every=2, log_every=3, hang_timeout=6)
result = trainer(args, model=model, train_dataset=points(75), callbacks=[WaitsForTheCut()]).fit()
weights = [parameter.tolist() for parameter in model.parameters()]
if os.environ["RANK"] == "0":
    Path("result.json").write_text(json.dumps([logged_losses(result), weights, result.state.samples]))
"""


class Machine(NamedTuple):
    """A network namespace, and its end of the cable."""

    name: str
    device: str
    address: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Generator[list[Machine]]:
    """Two machines that reach each other, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = [Machine(f"tl{os.getpid()}{end}", f"tl{os.getpid()}{end}", f"10.77.0.{end}") for end in (1, 2)]
    try:
        try:
            for machine in made:
                ip("netns", "add", machine.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        first, second = made
        ip(
            "link",
            "add",
            first.device,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            second.device,
            "netns",
            second.name,
        )
        for machine in made:
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            ip("-n", machine.name, "link", "set", "lo", "up")
            ip("-n", machine.name, "link", "set", machine.device, "up")
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


def launch(machine: Machine, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--cpu", "--num_machines=2", "--num_processes=2", f"--machine_rank={rank}", "--max_restarts=3"]
    rendezvous = ["--main_process_ip=10.77.0.1", "--main_process_port=29511", "--rdzv_backend=c10d", "--rdzv_id=job"]
    launcher = [sys.executable, "-m", "trainer_lib", "launch", *options, *rendezvous, "script.py"]
    named = ["unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"', machine.name, *launcher]
    variables = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": machine.device}
    with (folder / f"log_{rank}").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", machine.name, *named],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait_until(is_true: Callable[[], bool], logs: list[Path]) -> None:
    ends = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < ends, "\n".join(log.read_text() for log in logs)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("a machine loses its network; the launchers restart")
def test_a_machine_that_was_cut_off_comes_back_and_the_run_continues(machines: list[Machine], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    logs = [tmp_path / "log_0", tmp_path / "log_1"]
    cut_off = machines[1]
    with contextlib.ExitStack() as ended:
        launchers = [launch(machine, rank, tmp_path) for rank, machine in enumerate(machines)]
        for launcher in launchers:
            ended.callback(launcher.wait)
            ended.callback(launcher.terminate)
        wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2, logs)
        ip("-n", cut_off.name, "link", "set", cut_off.device, "down")
        (tmp_path / "is_cut").touch()
        wait_until(lambda: all("No rank has made progress" in log.read_text() for log in logs), logs)
        ip("-n", cut_off.name, "link", "set", cut_off.device, "up")
        wait_until(lambda: all(launcher.poll() is not None for launcher in launchers), logs)
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(log.read_text() for log in logs)
    assert "resumed at step" in logs[0].read_text() + logs[1].read_text()
    (whole, _) = run_world(uninterrupted, (), 2, timeout=60)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(whole))
    assert len(list((tmp_path / "runs").iterdir())) == 1  # a single run


FAILS_ONCE = """
import os, signal, sys

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        sys.exit(3)
    signal.pause()
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def unused_port() -> int:
    """Return a port that nobody listens on, and that the kernel gives to no connection of another test meanwhile."""
    ports = (random.SystemRandom().randrange(20_000, 30_000) for _ in range(100))
    return next(port for port in ports if not is_port_in_use(port))


@pytest.mark.slow
@pytest.mark.launch
def test_each_launcher_says_why_it_starts_its_processes_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_ONCE)
    options = ["--cpu", "--num_machines=2", "--num_processes=2", "--max_restarts=1", "--rdzv_backend=c10d"]
    meeting = ["--main_process_ip=127.0.0.1", f"--main_process_port={unused_port()}"]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer_lib", "launch", *options, *meeting, f"--machine_rank={rank}", "script.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for launcher in launchers:
            stack.callback(launcher.wait)
            stack.callback(launcher.terminate)
        ended = [launcher.communicate(timeout=PATIENCE) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ended
    assert [out for out, _ in ended] == ["attempt 1\n"] * 2
    said = sorted("\n".join(err.split("trainer-lib launch: ")[1:]) for _, err in ended)
    assert said == [
        "Process 1 of 2 failed with exit code 3.\nSystemExit: 3\nStarting all processes again (restart 1 of 1).\n",
        "Starting all processes again, as another machine does.\n",
    ]


def test_the_address_is_that_of_the_network_of_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    assert serves_rendezvous("127.0.0.1:29500") is None, "by its name, as torch does"

    named = "10.0.0.5"  # what the name of the machine leads to

    def addresses(name: str, port: object) -> list[tuple[object, ...]]:
        if named is None:
            raise OSError(name)
        return [(0, 0, 0, "", (named, port))]

    monkeypatch.setattr("trainer_lib.launchers.machine_address.own_address", lambda endpoint: "10.0.0.7")
    monkeypatch.setattr("trainer_lib.launchers.machine_address.is_port_in_use", lambda port: port == 1)
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    assert [serves_rendezvous(f"10.0.0.{host}") for host in (7, 8)] == [True, None]
    assert serves_rendezvous("10.0.0.7:1") is None, "another launcher of this machine serves it"
    named = "10.0.0.7"
    assert serves_rendezvous("10.0.0.7") is None
    named = None
    assert [serves_rendezvous(f"10.0.0.{host}") for host in (7, 8)] == [True, False]


def start_alone(port: int, *words: str) -> subprocess.Popen[str]:
    """Start the launcher of the first of two machines that meet by the backend `static`."""
    options = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    command = [sys.executable, "-m", "trainer_lib", "launch", *options, "--main_process_port", str(port), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_a_launcher_that_waits_for_another_machine(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    port = free_port()
    with start_alone(port, "--machine_rank", "0", str(tmp_path / "script.py")) as launch:
        await_true(lambda: is_port_in_use(port))
        time.sleep(0.5)  # until it waits
        launch.send_signal(signal.SIGINT)
        try:
            _, err = launch.communicate(timeout=20)
        finally:
            launch.kill()
    assert (launch.returncode, "Ended by SIGINT" in err) == (130, True)


@pytest.mark.slow
def test_a_signal_ends_a_launcher_whose_processes_have_ended_before_those_of_another_machine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60 * int(os.environ['RANK']))"
    )
    port = free_port()
    words = [str(script), str(tmp_path)]
    with (
        start_alone(port, "--machine_rank", "0", *words) as first,
        start_alone(port, "--machine_rank", "1", *words) as second,
    ):
        try:
            await_true(lambda: all((tmp_path / rank).exists() for rank in "01"))
            process = tmp_path / "0"  # exists until the first machine has seen its end
            await_true(lambda: bool(process.read_text()) and not Path("/proc", process.read_text()).exists())
            first.terminate()
            first.communicate(timeout=20)
        finally:
            first.kill()
            second.terminate()
    assert first.returncode == 128 + signal.SIGTERM


def await_true(is_true: Callable[[], bool]) -> None:
    """Wait until something is true, for at most half a minute."""
    ends = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_meet_at_an_address_of_ip_version_6(backend: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no address of version 6")
        port = probe.getsockname()[1]
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom trainer_lib import PartialState\nstate = PartialState()\n"
        "state.wait_for_everyone()\nPath(f'{state.process_index} of {state.num_processes}').touch()\n"
    )
    place = ["--main_process_ip=::1", f"--main_process_port={port}"]
    place = place if backend == "static" else [f"--rdzv_endpoint=[::1]:{port}", "--rdzv_backend=c10d"]
    launcher = [sys.executable, "-m", "trainer_lib", "launch", "--cpu", "--num_machines=2", "--num_processes=2", *place]
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    launches = [
        subprocess.Popen([*launcher, f"--machine_rank={rank}", "script.py"], cwd=tmp_path, env=variables)
        for rank in range(2)
    ]
    try:
        assert [launch.wait(PATIENCE) for launch in launches] == [0, 0]
    finally:
        for launch in launches:
            launch.kill()
    assert {file.name for file in tmp_path.glob("? of ?")} == {"0 of 2", "1 of 2"}
