"""A launch by MPI: mpirun starts the processes on the machines of a hostfile (`--mpirun_hostfile`)."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers import bootstrap
from trainer_lib.launchers.launch_plan import LOCALHOST, Plan
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.processes.exit_codes import SAME_REQUEST

# What the launcher does itself, and mpirun does not.
_OF_THE_LAUNCHER = ("machine_rank", "max_restarts", "monitor_interval", "log_dir", "tee", "rdzv_backend", "rdzv_conf")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARDED = (*_ENDING, signal.SIGUSR1)
_INTERVAL = 0.1  # seconds
_ENDED = 1  # the exit code of an mpirun that a signal ends


def mpirun_command(
    values: LaunchValues, plan: Plan, script: Sequence[str], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the processes, and the variables that it passes on to all machines.

    Raises:
        ConfigurationError: If there is no hostfile or no mpirun, or an option is one that mpirun has no part in.
    """
    for name in _OF_THE_LAUNCHER:
        if values.source(name) == f"--{name}" or values[name] != SETTINGS[name].default:
            raise ConfigurationError(
                f"{name} ({values.source(name)}) has no effect with --mpirun_hostfile: mpirun starts and monitors the "
                "processes. Leave one of them out."
            )
    file = Path(values["mpirun_hostfile"]).expanduser()
    if not file.is_file():
        raise ConfigurationError(f"The hostfile {str(file)!r} is not there. Name a file with a line for each machine.")
    program = shutil.which("mpirun")
    if program is None:
        raise ConfigurationError(
            "There is no program mpirun here. Install Open MPI, MPICH or Intel MPI, or leave out --mpirun_hostfile."
        )
    passed = {**variables, **_address(values), **_workers(values)}
    count, share = plan.world_size, plan.num_processes
    if _is_open_mpi(program):
        place = ["--hostfile", str(file), "-np", str(count), "--map-by", f"ppr:{share}:node"]
        place += [word for name in sorted(passed) for word in ("-x", name)]
    else:
        place = ["-f", str(file), "-n", str(count), "-ppn", str(share), "-genvlist", ",".join(sorted(passed))]
    rank = [sys.executable, bootstrap.__file__, bootstrap.MPIRUN, *(["-m"] if values["module"] else [])]
    interpreter = [] if values["no_python"] else rank
    return [program, *place, *interpreter, *script], passed


def run_mpirun(command: Sequence[str], patience: float) -> int:
    """Run mpirun, pass signals on to it, and return its exit code.

    Args:
        command: The command of `mpirun_command`.
        patience: The seconds that ranks have to save and end after a signal; a second one ends them sooner.
    """
    process = subprocess.Popen(command, start_new_session=True)  # a Ctrl-C comes once, from here
    request = _Request(process, patience, waits=_is_open_mpi(command[0]) and bootstrap.__file__ in command)
    before = {number: signal.signal(number, request.forward) for number in _FORWARDED}
    try:
        return request.exit_code()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Request:
    """A signal that asks the ranks to end, from its arrival to their end."""

    def __init__(self, process: "subprocess.Popen[bytes]", patience: float, waits: bool) -> None:
        self._process, self._patience, self._waits = process, patience, waits
        self._number = 0
        self._ends = float("inf")
        self._own_codes = [128 + signal.SIGTERM]  # with which the ranks or mpirun end after the signal

    def forward(self, number: int, frame: Any) -> None:
        """Pass a signal on to the ranks; a second one that asks them to end ends mpirun, which kills them."""
        del frame
        if number not in _ENDING:
            self._process.send_signal(number)
        elif not self._number:
            self._number, self._ends = number, time.monotonic() + self._patience
            if self._waits:
                self._process.send_signal(bootstrap.SIGTERM_OF_MPIRUN)
            else:
                self._end_mpirun(number)
        elif time.monotonic() > self._ends - self._patience + SAME_REQUEST:
            self._end_mpirun(number)

    def exit_code(self) -> int:
        """Wait for mpirun, end it once the ranks had their time, and return its exit code."""
        while self._process.poll() is None:
            if time.monotonic() > self._ends:
                self._end_mpirun(signal.SIGTERM)
            time.sleep(_INTERVAL)
        code = self._process.returncode
        code = code if code >= 0 else 128 - code
        return 128 + self._number if self._number and code in self._own_codes else code

    def _end_mpirun(self, number: int) -> None:
        self._ends = float("inf")
        self._own_codes.append(_ENDED)
        self._process.send_signal(number)


def describe_mpirun(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return what a dry run prints."""
    lines = [f"  {name}={value}" for name, value in sorted(variables.items())]
    return "\n".join(["mpirun gets these variables:", *lines, "and this command:", f"  {shlex.join(command)}",
                      "Nothing was started."])  # fmt: skip


def _address(values: LaunchValues) -> dict[str, str]:
    """Return where the ranks meet, if it is given; else they find it in what MPI tells them."""
    address, port = values["main_process_ip"], values["main_process_port"]
    known = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port) if port and values.is_asked("main_process_port") else None,
    }
    return {name: value for name, value in known.items() if value is not None and value != LOCALHOST}


def _workers(values: LaunchValues) -> dict[str, str]:
    count = values["mpirun_ccl"]
    if count is not None and not (count.isdecimal() and int(count)):
        raise ConfigurationError(f"--mpirun_ccl must be a whole number of at least 1 (got {count!r}).")
    return {} if count is None else {"CCL_WORKER_COUNT": count}


def _is_open_mpi(program: str) -> bool:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return True
    if "HYDRA" in text.upper() or "Intel" in text:
        return False
    raise ConfigurationError(
        f"{program} is not known: `mpirun --version` says {text.strip()[:80]!r}. Known: Open MPI, MPICH, Intel MPI."
    )
