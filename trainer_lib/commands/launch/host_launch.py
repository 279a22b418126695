"""A launch on the machines of DeepSpeed's hostfile: from one of them by pdsh, or on each of them (standard)."""

import contextlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib.commands.launch.hostfile import Hosts, read_hostfile, selected
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers.settings.launch_options import SETTINGS

_PORT = 29500
_HERE = ("standard", "nossh")  # the launcher runs on each machine
_BY_MPI = ("openmpi", "mpich")
# What differs between machines, or is about starting on several.
_OF_MACHINES = (
    "config_file", "num_machines", "num_processes", "nproc_per_node", "machine_rank", "main_process_ip",
    "main_process_port", "rdzv_endpoint", "rdzv_id", "gpu_ids", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "dry_run", "print_config",
)  # fmt: skip
_PASSED_ON = ("NCCL", "GLOO", "PYTHON", "UCX", "OMP_NUM_THREADS")  # beginnings of names, mostly as DeepSpeed does
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HostLaunch(NamedTuple):
    """The machines of a launch.

    Args:
        hosts: The machines, and the devices of each.
        processes: How many processes each runs.
        address: The address of the first one.
        port: A port of it.
    """

    hosts: Hosts
    processes: int
    address: str
    port: int


def use_hostfile(values: LaunchValues) -> HostLaunch | None:
    """Take up what a hostfile says; return the machines to start on if this machine starts the others.

    Raises:
        ConfigurationError: If the hostfile does not fit the options.
        UnsupportedError: If its launcher is not supported.
    """
    way, path = values["deepspeed_multinode_launcher"], values["deepspeed_hostfile"]
    if path is None:
        _check_without_hostfile(values, way)
        return None
    if way in _BY_MPI:
        _check_no_filters(values, way)
        values.set("mpirun_hostfile", path, values.source("deepspeed_hostfile"))
    hosts = selected(read_hostfile(path), values["deepspeed_inclusion_filter"], values["deepspeed_exclusion_filter"])
    launch = _fitted(values, hosts)
    source = f"the hostfile {path}"
    values.set("num_machines", len(hosts), source)
    values.set("num_processes", launch.processes * len(hosts), source)
    if way in _BY_MPI:
        return None
    values.set("main_process_ip", launch.address, source)
    values.set("main_process_port", launch.port, source)
    if way not in (None, "pdsh", *_HERE):
        raise UnsupportedError(
            f"deepspeed_multinode_launcher={way} is not supported. Known: pdsh, standard, nossh, openmpi, mpich; for "
            "SLURM, `trainer-lib submit` writes the job."
        )
    if way in _HERE:
        if not values.is_asked("machine_rank"):
            values.set("machine_rank", _own_rank(hosts), source)
        slots = hosts[list(hosts)[values["machine_rank"]]] if values["machine_rank"] < len(hosts) else []
        if slots != list(range(len(slots))) and not values["cpu"]:
            values.set("gpu_ids", ",".join(map(str, slots)), source)
        return None
    return launch


def host_commands(values: LaunchValues, launch: HostLaunch, script: Sequence[str], run_id: str) -> dict[str, str]:
    """Return the command that each machine runs in a shell, by the machine's name."""
    options = ["--config_file", str(values.file.resolve())] if values.file is not None else []
    for name in SETTINGS:
        if values.source(name) == f"--{name}" and name not in _OF_MACHINES:
            options += _as_option(name, values[name])
    world: dict[str, Any] = {
        "num_machines": len(launch.hosts),
        "num_processes": launch.processes * len(launch.hosts),
        "main_process_ip": launch.address,
        "main_process_port": launch.port,
        "rdzv_id": run_id,
        "deepspeed_multinode_launcher": "standard",
    }
    variables = [f"{name}={value}" for name, value in sorted(_variables(values).items())]
    commands: dict[str, str] = {}
    for rank, (host, slots) in enumerate(launch.hosts.items()):
        of_host = {**world, "machine_rank": rank}
        if slots[: launch.processes] != list(range(launch.processes)) and not values["cpu"]:
            of_host["gpu_ids"] = ",".join(map(str, slots[: launch.processes]))
        elif values.source("gpu_ids") == "--gpu_ids":
            of_host["gpu_ids"] = values["gpu_ids"]
        words = [sys.executable, "-m", "trainer_lib", "launch", *options]
        words += [word for name, value in of_host.items() for word in _as_option(name, value)]
        command = shlex.join(["env", *variables, *words, *script])
        # No exec: pdsh adds a command that prints the exit code.
        commands[host] = f"cd {shlex.quote(str(Path.cwd()))} && {command}"
    return commands


def describe_hosts(commands: Mapping[str, str]) -> str:
    """Return what a dry run prints."""
    return "\n".join([f"On {host}:\n  {command}" for host, command in commands.items()] + ["Nothing was started."])


def start_on_hosts(values: LaunchValues, launch: HostLaunch, script: Sequence[str]) -> int:
    """Run the launcher on all machines, and return the exit code of the first one that failed, or 0.

    A signal is passed on to the launchers there. If one fails, the others get `shutdown_timeout` seconds to end.

    Raises:
        ConfigurationError: If pdsh is not installed.
    """
    run_id = f"hosts-{uuid.uuid4().hex[:12]}"
    commands = host_commands(values, launch, script, run_id)
    if values["dry_run"]:
        print(describe_hosts(commands))
        return 0
    program = shutil.which("pdsh")
    if program is None:
        raise ConfigurationError(
            "There is no program pdsh here, which starts the launcher on the other machines. Install it (the package "
            "pdsh, and ssh without a password to each machine), or give --deepspeed_multinode_launcher standard and "
            "start this command on each machine."
        )
    with environment.patch_environment(PDSH_RCMD_TYPE=environment.variable("PDSH_RCMD_TYPE") or "ssh"):
        shells = {host: _remote(program, host, command) for host, command in commands.items()}
        with _passed_on(program, commands, run_id):
            return _watch(shells, program, run_id, values["shutdown_timeout"])


def _watch(shells: Mapping[str, subprocess.Popen[bytes]], program: str, run_id: str, patience: float) -> int:
    failed, ends = 0, float("inf")
    while left := [host for host, shell in shells.items() if shell.poll() is None]:
        codes = [shell.returncode for shell in shells.values() if shell.returncode]
        if codes and not failed:
            failed, ends = codes[0], time.monotonic() + patience
        if time.monotonic() > ends:
            _signal(program, left, run_id, signal.SIGKILL)
            for host in left:
                shells[host].kill()
        time.sleep(0.1)
    codes = [failed, *(shell.returncode for shell in shells.values())]
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passed_on(program: str, hosts: Mapping[str, str], run_id: str) -> Generator[None]:
    """Return the context in which signals go to the launchers on all machines."""

    def forward(number: int, frame: Any) -> None:
        del frame
        _signal(program, list(hosts), run_id, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(program: str, hosts: Sequence[str], run_id: str, number: int) -> None:
    """Send a signal to the launchers of a run, which have its name among their arguments."""
    # From its beginning: pdsh, ssh and shells have the launcher's command among their own arguments.
    python = re.sub(r"[^A-Za-z0-9/]", ".", sys.executable)
    pattern = f"^{python} -m trainer_lib launch .*--rdzv_id {run_id}"
    command = f"pkill -{int(number)} -f -- {shlex.quote(pattern)}"
    for shell in [_remote(program, host, command) for host in hosts]:
        shell.wait()


def _remote(program: str, host: str, command: str) -> "subprocess.Popen[bytes]":
    # pdsh replaces %h, %n, %u and %%. A session of its own: a Ctrl-C comes once, from here.
    words = [program, "-S", "-w", host, command.replace("%", "%%")]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def _fitted(values: LaunchValues, hosts: Hosts) -> HostLaunch:
    """Return the processes and the address, checked against what options say."""
    counts = {len(slots) for slots in hosts.values()}
    machines, given = values["num_machines"], values["num_processes"]
    if values.is_asked("num_machines") and machines not in (1, len(hosts)):
        raise ConfigurationError(
            f"num_machines is {machines} ({values.source('num_machines')}) and the hostfile has {len(hosts)} machines "
            "after its filters. Leave num_machines out, or change the filter."
        )
    if values.is_asked("num_processes") and given is not None:
        processes, rest = divmod(given, len(hosts))
        if rest or not 0 < processes <= min(counts):
            raise ConfigurationError(
                f"num_processes is {given} ({values.source('num_processes')}), and the hostfile has {len(hosts)} "
                f"machines with {_counted(hosts)} slots. Give a multiple of {len(hosts)} that fits, or leave it out."
            )
    elif len(counts) > 1:
        raise ConfigurationError(
            f"The machines of the hostfile have {_counted(hosts)} slots, and each machine runs the same number of "
            f"processes. Give --num_processes {min(counts) * len(hosts)}, or change the hostfile or the filter."
        )
    else:
        processes = counts.pop()
    address = values["main_process_ip"] or next(iter(hosts))
    return HostLaunch(hosts, processes, address, values["main_process_port"] or _PORT)


def _counted(hosts: Hosts) -> str:
    return ", ".join(str(len(slots)) for slots in hosts.values())


def _check_without_hostfile(values: LaunchValues, way: str | None) -> None:
    is_given = values.source("deepspeed_multinode_launcher")[:2] == "--"
    if way not in (None, *_HERE) and (is_given or values["num_machines"] > 1):
        raise ConfigurationError(
            f"deepspeed_multinode_launcher={way} needs --deepspeed_hostfile, a file with a line for each machine. Give "
            "it, or --deepspeed_multinode_launcher standard and start the launcher on each machine with --machine_rank."
        )
    for name in ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"):
        if values.source(name)[:2] == "--":
            raise ConfigurationError(f"--{name} has no effect without --deepspeed_hostfile. Give it, or leave it out.")


def _check_no_filters(values: LaunchValues, way: str) -> None:
    for name in ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"):
        if values[name]:
            raise ConfigurationError(
                f"--{name} has no effect with deepspeed_multinode_launcher={way}: mpirun reads the hostfile itself. "
                "Write another hostfile, or use pdsh."
            )


def _own_rank(hosts: Hosts) -> int:
    """Return the number of this machine in the hostfile, by its name or address."""
    own = [number for number, host in enumerate(hosts) if _is_here(host)]
    if len(own) != 1:
        raise ConfigurationError(
            f"{'Several machines' if own else 'No machine'} of the hostfile ({', '.join(hosts)}) "
            f"{'are' if own else 'is'} this one ({socket.gethostname()}). Give --machine_rank."
        )
    return own[0]


def _is_here(host: str) -> bool:
    if host in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))  # only an address of this machine
        return True
    return False


def _as_option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        if SETTINGS[name].is_switch:
            return [f"--{name}" if value else f"--{name}=no"]
        return [f"--{name}", "yes" if value else "no"]
    if isinstance(value, list):
        return [f"--{name}", ",".join(map(str, value))]
    return [f"--{name}", str(value)]


def _variables(values: LaunchValues) -> dict[str, str]:
    inherited = [setting.variable for name, setting in SETTINGS.items() if values.is_inherited(name)]
    return environment.variables_that_begin_with(*_PASSED_ON, *inherited)
