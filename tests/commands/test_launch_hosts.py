"""Launches on the machines of DeepSpeed's hostfile; two machines are two names of this one, and pdsh is a stand-in."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.launched import PYTHON_PATH
from trainer_lib import ConfigurationError, UnsupportedError
from trainer_lib.commands.launch.host_launch import host_commands, use_hostfile
from trainer_lib.commands.launch.hostfile import read_hostfile, selected
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.processes.ports import free_port

# As pdsh does, with this machine for each host: %h, %n, %u and %% in the command are replaced, and a command is
# added that prints its exit code.
PDSH = """#!{python}
import subprocess, sys
assert sys.argv[1:3] == ["-S", "-w"], sys.argv
host, command = sys.argv[3:]
for sign, value in (("%h", host), ("%n", "0"), ("%u", "root"), ("%%", "%")):
    command = command.replace(sign, value)
with open("calls", "a") as file:
    print(host, file=file)
shell = subprocess.Popen(["sh", "-c", command + ";echo XXRETCODE:$?"], stdout=subprocess.PIPE, text=True)
code = 0
for line in shell.stdout:
    text, sign, number = line.partition("XXRETCODE:")
    code = int(number) if sign else code
    print(text, end="", flush=True)
sys.exit(code)
"""


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("# two machines\nlocalhost slots=2\n\n127.0.0.1 slots=2  # the same one\n")
    return file


def values(hostfile: Path | str, *options: str) -> LaunchValues:
    arguments = ["--cpu", "--use_deepspeed", "--deepspeed_hostfile", str(hostfile), *options, "train.py"]
    return LaunchValues(parse(arguments)[0])


def test_filters_leave_machines_and_devices(hostfile: Path) -> None:
    hosts = read_hostfile(str(hostfile))
    assert hosts == {"localhost": [0, 1], "127.0.0.1": [0, 1]}
    assert selected(hosts, None, None) == hosts
    assert selected(hosts, "127.0.0.1:1@localhost", None) == {"localhost": [0, 1], "127.0.0.1": [1]}
    assert selected(hosts, None, "localhost@127.0.0.1:0") == {"127.0.0.1": [1]}


@pytest.mark.parametrize(
    ("text", "filters", "message"),
    [
        ("a slots=x", {}, r"Line 1 of the hostfile .* is 'a slots=x'. It has lines like `worker-1 slots=4`"),
        ("a slots=1\na slots=2", {}, "two lines for a"),
        ("# nothing", {}, "names no machine"),
        ("a slots=1", {"included": "a", "excluded": "a"}, "both given"),
        ("a slots=1", {"included": "b"}, "Unknown machine of the hostfile 'b'. Known: a"),
        ("a slots=1", {"included": "a:1"}, "a has no slot 1 in the hostfile, which gives it 1"),
        ("a slots=1", {"included": "a:x"}, "A filter is like a:0,2"),
        ("a slots=1", {"excluded": "a"}, "leaves no machine"),
    ],
)
def test_a_hostfile_or_a_filter_with_a_mistake_is_refused(
    text: str, filters: Mapping[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        selected(read_hostfile(str(tmp_path / "hosts")), filters.get("included"), filters.get("excluded"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            ["--num_machines", "3"],
            ConfigurationError,
            "num_machines is 3 .--num_machines. and the hostfile has 2",
        ),
        (["--num_processes", "6"], ConfigurationError, "num_processes is 6 .* 2 machines with 2, 2 slots"),
        (["--deepspeed_exclusion_filter", "localhost:0"], ConfigurationError, "1, 2 slots.*Give --num_processes 2"),
        (["--deepspeed_multinode_launcher", "slurm"], UnsupportedError, "slurm is not supported.*trainer-lib submit"),
        (
            ["--deepspeed_multinode_launcher", "standard"],
            ConfigurationError,
            "Several machines .*--machine_rank",
        ),
        (
            ["--deepspeed_multinode_launcher", "openmpi", "--deepspeed_inclusion_filter", "localhost"],
            ConfigurationError,
            "deepspeed_inclusion_filter has no effect with deepspeed_multinode_launcher=openmpi",
        ),
    ],
)
def test_options_that_do_not_fit_the_hostfile_are_refused(
    options: Sequence[str], kind: type[Exception], message: str, hostfile: Path
) -> None:
    with pytest.raises(kind, match=message):
        use_hostfile(values(hostfile, *options))


def test_a_missing_hostfile_is_named() -> None:
    with pytest.raises(ConfigurationError, match="The hostfile 'hosts' is not there"):
        use_hostfile(values("hosts"))
    for option in ("deepspeed_inclusion_filter=a", "deepspeed_multinode_launcher=pdsh"):
        given = LaunchValues(parse(["--use_deepspeed", f"--{option}", "train.py"])[0])
        with pytest.raises(ConfigurationError, match="--deepspeed_hostfile"):
            use_hostfile(given)


def test_each_machine_finds_its_rank_and_devices(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"elsewhere.invalid slots=4\n{socket.gethostname()} slots=4\n")
    options = ["--deepspeed_multinode_launcher", "standard", "--deepspeed_inclusion_filter"]
    chosen = f"elsewhere.invalid:0,1@{socket.gethostname()}:1,3"
    given = LaunchValues(
        parse(["--use_deepspeed", "--deepspeed_hostfile", str(tmp_path / "hosts"), *options, chosen, "train.py"])[0]
    )
    assert use_hostfile(given) is None
    settled = [given[name] for name in ("machine_rank", "num_machines", "num_processes", "main_process_ip", "gpu_ids")]
    assert settled == [1, 2, 4, "elsewhere.invalid", "1,3"]


def test_each_machine_gets_its_command(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO 100%")
    given = values(hostfile, "--zero_stage", "3", "--num_processes", "2", "--mixed_precision", "bf16", "--debug=no")
    launch = use_hostfile(given)
    assert launch is not None
    commands = host_commands(given, launch, ["train.py", "--lr", "a b"], "hosts-1")
    assert list(commands) == ["localhost", "127.0.0.1"]
    world = "--num_machines 2 --num_processes 2 --main_process_ip localhost --main_process_port 29500"
    for rank, command in enumerate(commands.values()):
        assert command.startswith(f"cd {Path.cwd()} && env ")
        assert "'NCCL_DEBUG=INFO 100%'" in command
        # --debug=no overrides what the configuration file says.
        assert "--cpu --mixed_precision bf16 --debug=no --use_deepspeed --zero_stage 3" in command
        assert world in command
        assert f"--deepspeed_multinode_launcher standard --machine_rank {rank} train.py --lr 'a b'" in command


def started(folder: Path, hostfile: Path, script: str, *, has_pdsh: bool = True) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(script)
    if has_pdsh:
        program = folder / "pdsh"
        program.write_text(PDSH.format(python=sys.executable))
        program.chmod(0o755)
    launcher = [sys.executable, "-m", "trainer_lib", "launch", "--cpu", "--use_deepspeed", "--zero_stage", "0"]
    machines = ["--deepspeed_hostfile", str(hostfile), "--num_processes", "2", "--main_process_port", str(free_port())]
    machines += ["--shutdown_timeout", "3"]  # seconds that the others get when one fails
    path = [str(folder), os.environ["PATH"]] if has_pdsh else [str(Path(sys.executable).parent)]
    variables = {"PATH": os.pathsep.join(path), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *machines, "script.py"],
        cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def output_of(launcher: "subprocess.Popen[str]") -> str:
    """Return what a launcher has printed, once it ended; end it if it does not."""
    try:
        return launcher.communicate(timeout=100)[0]
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGTERM)
        pytest.fail(f"The launcher did not end: {launcher.communicate(timeout=60)[0]}")


WORLD = """
import json, os, sys, torch
from pathlib import Path
from trainer_lib import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]))
told = [accelerator.num_processes, total.item(), os.environ["LOCAL_WORLD_SIZE"], str(accelerator.distributed_type)]
Path(f"rank_{accelerator.process_index}.json").write_text(json.dumps(told))
accelerator.end_training()
sys.exit(7 * accelerator.process_index)
"""
SLEEPS = """
import os, signal, sys, time
from pathlib import Path
def end(number, frame):
    time.sleep(2)  # as long as a save takes
    Path(f"ended_{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_machines_form_a_world_and_an_exit_code_comes_back(tmp_path: Path, hostfile: Path) -> None:
    launcher = started(tmp_path, hostfile, WORLD)
    output = output_of(launcher)
    for rank in range(2):
        told = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert told == [2, 3.0, "1", "DEEPSPEED"], output
    assert launcher.returncode == 7, output
    calls = (tmp_path / "calls").read_text().split()  # then the other machine is ended
    assert sorted(calls[:2]) == ["127.0.0.1", "localhost"]


@pytest.mark.slow
@pytest.mark.launch
def test_a_signal_reaches_the_machines_and_the_launcher_waits_for_them(tmp_path: Path, hostfile: Path) -> None:
    launcher = started(tmp_path, hostfile, SLEEPS)
    ends = time.monotonic() + 100
    while len(list(tmp_path.glob("ready_*"))) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=100)
    ended = len(list(tmp_path.glob("ended_*")))  # by then, and not only when the pipe of the output closes
    output = output_of(launcher)
    assert ended == 2, output
    assert launcher.returncode == 128 + signal.SIGTERM, output


@pytest.mark.launch
def test_without_pdsh_the_package_is_named(tmp_path: Path, hostfile: Path) -> None:
    launcher = started(tmp_path, hostfile, WORLD, has_pdsh=False)
    output = output_of(launcher)
    assert launcher.returncode != 0
    assert "There is no program pdsh here" in output
    assert "--deepspeed_multinode_launcher standard" in output
