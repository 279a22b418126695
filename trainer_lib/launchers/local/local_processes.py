"""Runs a program as the processes of this machine: starts, monitors, restarts and ends them, without importing torch.

`elastic` does the same with torch's agent, for several machines, functions and output that is also written to files.
Importing torch takes as long as all else between a command and the first step, so the launcher leaves it to the
processes, and to a server of their store that starts beside them.
"""

import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.launchers.launch_plan import Plan
from trainer_lib.launchers.local.local_store import LocalStore
from trainer_lib.launchers.process_failures import GRACE_AFTER_DEATH, Failure, failed, failure_of
from trainer_lib.processes.exit_codes import SAME_REQUEST, reason_of
from trainer_lib.processes.process_groups import kill_leftovers
from trainer_lib.processes.signal_inbox import SignalInbox


def run_local(command: Sequence[str], plan: Plan) -> None:
    """Run a program as the processes of a plan for this machine.

    Raises:
        ConfigurationError: If the plan's `log_dir` cannot be written.
        ProcessFailedError: If a process failed and no restart is left.
        WorldError: If the port of the plan is in use, the program cannot be started, or the store died.
        KeyboardInterrupt: If this process was interrupted; the other processes have ended.
        SystemExit: If another signal ended this process, or a signal or a deadline all other processes, which have
            ended.
    """
    with ExitStack() as stack:
        folder = _folder(plan, stack)
        signals = stack.enter_context(SignalInbox())
        store = stack.enter_context(LocalStore(plan.main_process_port, is_lazy=plan.num_processes == 1))
        _Launch(command, plan, folder, store, signals).run()


class _Launch:
    """The processes of one launch, over all its restarts."""

    def __init__(
        self, command: Sequence[str], plan: Plan, folder: Path, store: LocalStore, signals: SignalInbox
    ) -> None:
        self._command = list(command)
        self._plan = plan
        self._folder = folder
        self._store = store
        self._signals = signals
        self._processes: list[subprocess.Popen[bytes]] = []
        self._records: list[Path] = []

    def run(self) -> None:
        """Run the program until all processes succeed, or no restart is left."""
        for attempt in range(self._plan.max_restarts + 1):
            try:
                self._start(attempt)
                failures = self._watch()
            finally:
                self._end(signal.SIGTERM, self._plan.shutdown_timeout)  # after an error of the launcher itself
                if any(self._codes()):
                    kill_leftovers(process.pid for process in self._processes)
            if not failures:
                return
            number = self._signals.take()
            if number is not None:
                self._interrupt(number)
            error = failed(failures, self._plan.world_size, is_printed=True)
            if attempt == self._plan.max_restarts:
                raise error
            restart = f"restart {attempt + 1} of {self._plan.max_restarts}"
            self._plan.announce(f"{error}\nStarting all processes again ({restart}).")

    def _start(self, attempt: int) -> None:
        folder = self._folder / f"attempt_{attempt}"
        self._processes = []
        self._records = [folder / str(rank) / "error.json" for rank in range(self._plan.num_processes)]
        shared = self._variables(attempt)
        for rank, record in enumerate(self._records):
            record.parent.mkdir(parents=True)
            own = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
            variables = environment.with_variables({**shared, **own, "TORCHELASTIC_ERROR_FILE": str(record)})
            self._processes.append(_started(self._command, variables))

    def _variables(self, attempt: int) -> Mapping[str, str]:
        """Return the variables that torch's agent sets, for all ranks."""
        size = {name: str(self._plan.num_processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
        return size | {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": self._plan.role,
            "MASTER_ADDR": self._store.address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._plan.max_restarts),
            "TORCHELASTIC_RUN_ID": self._plan.rdzv_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
            "TRAINER_LIB_STORE_FILE": "",  # of this process's own world
            "TRAINER_LIB_KILLS_STOPPED_RANKS": "1",
        }

    def _watch(self) -> list[Failure]:
        """Wait until all processes have ended; return the failures, if there are any."""
        self._wait(lambda codes: None not in codes or any(codes) or self._store.is_dead, None)
        codes = self._codes()
        if not any(codes):
            if None in codes:
                raise self._store.died()
            return []
        if self._are_ending(codes):
            self._wait(lambda codes: None not in codes, self._plan.shutdown_timeout)
        by_themselves = self._codes()
        self._end(signal.SIGTERM, GRACE_AFTER_DEATH)
        interruption = _interruption(by_themselves)
        if interruption is None:
            return self._failures(codes)
        failures = self._failures(by_themselves)
        if any(failure.is_first_cause for failure in failures):
            raise failed(failures, self._plan.world_size, is_printed=True)
        raise SystemExit(interruption)  # an interrupted run is not restarted

    def _failures(self, codes: Sequence[int | None]) -> list[Failure]:
        ends = enumerate(zip(codes, self._codes(), self._records, strict=True))
        return [
            failure_of(rank, code, record, final_code=final_code)
            for rank, (code, final_code, record) in ends
            if code or record.is_file()
        ]

    def _are_ending(self, codes: Sequence[int | None]) -> bool:
        """Whether a process was interrupted, and so all are: they save together, then end one after the other."""
        return any(
            code and reason_of(code) and not record.is_file() for code, record in zip(codes, self._records, strict=True)
        )

    def _wait(self, is_over: Callable[[Sequence[int | None]], bool], seconds: float | None) -> None:
        """Wait for a state of the processes, for at most some seconds; a signal to the launcher ends them."""
        ends = float("inf") if seconds is None else time.monotonic() + seconds
        while not is_over(self._codes()) and time.monotonic() < ends:
            self._signals.wait(self._plan.monitor_interval)
            number = self._signals.take()
            if number is not None:
                self._interrupt(number)

    def _interrupt(self, number: int) -> NoReturn:
        """Pass a signal on, wait until the processes have ended, and end the launch."""
        began = time.monotonic()
        self._send(number)
        while None in self._codes() and time.monotonic() < began + self._plan.shutdown_timeout:
            self._signals.wait(self._plan.monitor_interval)
            if self._signals.take() is not None and time.monotonic() > began + SAME_REQUEST:  # do not wait
                break
        self._end(signal.SIGKILL, 0)
        code = _interruption(self._codes())
        if code not in (None, 128 + number):  # the processes were ending already
            raise SystemExit(code)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _end(self, number: int, patience: float) -> None:
        """End the processes that are left: by a signal, and after some seconds by SIGKILL."""
        self._send(number)
        ends = time.monotonic() + patience
        while None in self._codes() and time.monotonic() < ends:
            self._signals.wait(self._plan.monitor_interval)
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]


def _started(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=variables, start_new_session=True)
    except OSError as error:
        hint = " A script needs a first line such as #!/bin/sh." if error.errno == errno.ENOEXEC else ""
        raise WorldError(f"{command[0]!r} could not be started: {error.strerror}.{hint}") from error


def _interruption(codes: Sequence[int | None]) -> int | None:
    """Return the exit code of the first process that was interrupted."""
    return next((code for code in codes if code and reason_of(code)), None)


def _folder(plan: Plan, stack: ExitStack) -> Path:
    """Return the folder of the processes' records."""
    if plan.log_dir is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainer_lib_")))
    try:
        Path(plan.log_dir).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{plan.rdzv_id}_", dir=plan.log_dir))
    except OSError as error:
        raise ConfigurationError(f"log_dir cannot be written: {error.strerror} ({plan.log_dir}).") from error
