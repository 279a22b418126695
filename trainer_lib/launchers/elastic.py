"""Runs a program or a function under torch's elastic agent: starts, monitors, restarts and ends its processes."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, ProcessFailure, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.launchers.launch_plan import Plan
from trainer_lib.launchers.machine_address import own_address, serves_rendezvous
from trainer_lib.launchers.process_failures import (
    GRACE_AFTER_DEATH,
    Failure,
    ProcessFailedError,
    failed,
    failure_of,
)
from trainer_lib.launchers.rendezvous import MeetAtPort, MeetInFile, agree_on_round, wait_interruptibly
from trainer_lib.processes.exit_codes import SAME_REQUEST, reason_of
from trainer_lib.processes.process_groups import kill_leftovers
from trainer_lib.processes.signal_inbox import FORWARDED, restored_handlers

_ROUNDS = ("c10d", "etcd-v2")  # backends by which machines meet again and again
_POLL = 0.05  # seconds between two checks for processes that still save
_ENDING = "ending"  # a file beside a process's error file: the processes are being ended
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


def run_elastic(entry: str | Callable[..., Any], args: Sequence[Any], plan: Plan) -> list[Any]:
    """Run a program, or a function, as the processes of a plan; return the function's results in order of rank.

    Raises:
        ProcessFailedError: If a process failed and no restart is left.
        WorldError: If the machines do not find each other.
        KeyboardInterrupt: If this process was interrupted; the other processes have ended.
        SystemExit: If another signal ended this process, or a signal or a deadline all other processes, which have
            ended.
    """
    with (
        _torch_is_quiet(plan.verbose),
        _signals_are_passed_on(),
        _log_folder(plan) as folder,
        _meeting(entry, plan, Path(folder)) as meeting,
    ):
        agent = _Agent(entry, args, plan, meeting, folder)
        try:
            result = agent.run()
        except (RendezvousError, dist.DistError, TimeoutError) as error:
            raise _not_met(plan, error) from error
        except SignalException as stop:
            if agent.interruption in (None, 128 + stop.sigval):
                raise
            raise SystemExit(agent.interruption) from None  # the processes were ending already
        finally:
            agent.forget_store()
        if result is None:  # the other machines ended before this one joined
            return []
        if result.is_failed():
            if agent.interruption is not None and not agent.has_first_cause:
                raise SystemExit(agent.interruption)
            raise agent.failed()
        return [value for _, value in sorted(result.return_values.items())]


# A decorator hides the types of its methods, so that a typed subclass could not override them.
_TorchAgent: Any = LocalElasticAgent


class _Agent(_TorchAgent):
    """Torch's agent, with a shorter wait after a death and a better error."""

    def __init__(
        self, entry: str | Callable[..., Any], args: Sequence[Any], plan: Plan, meeting: RendezvousHandler, folder: str
    ) -> None:
        is_static = plan.num_machines > 1 and plan.rdzv_backend == "static"
        address, port = plan.endpoint.rsplit(":", 1) if is_static else (None, None)
        spec = WorkerSpec(
            role=plan.role,
            local_world_size=plan.num_processes,
            rdzv_handler=meeting,
            entrypoint=entry,
            # The agent replaces ${local_rank} in arguments, which must arrive unchanged.
            args=tuple(value.replace("$", "$$") if isinstance(value, str) else value for value in args),
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_interval,
            master_addr=address,
            master_port=None if port is None else int(port),
            local_addr=None if plan.is_local else own_address(plan.endpoint),
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=folder, tee=_streams(plan)),
            start_method=plan.start_method,
            log_line_prefix_template=plan.log_line_prefix_template,
            shutdown_timeout=plan.shutdown_timeout,
        )
        self._plan = plan
        self._is_function = callable(entry)
        # A program prints its tracebacks itself; with `tee`, each line with a prefix.
        self._is_printed = isinstance(entry, str) and plan.tee == "0"
        self._died: dict[int, int | None] = {}  # by themselves: their exit codes, where torch does not know them
        self.interruption: int | None = None  # the exit code of processes that ended early on request
        self._failures: list[Failure] = []
        self._served: dist.TCPStore | None = None  # to the processes of all machines, by the first one

    def failed(self) -> ProcessFailedError:
        """Return the error for the last attempt."""
        return failed(self._failures, self._plan.world_size, is_printed=self._is_printed)

    @property
    def has_first_cause(self) -> bool:
        """Whether a process failed in the last attempt that did not follow another."""
        return any(failure.is_first_cause for failure in self._failures)

    def forget_store(self) -> None:
        """Release the store and its port."""
        self._store = None
        self._worker_group.store = None
        self._served = None

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        if self._plan.num_machines == 1 or self._plan.rdzv_backend not in _ROUNDS:
            return
        machine, machines = worker_group.group_rank, worker_group.group_world_size
        address, used = own_address(self._plan.endpoint), self._plan.max_restarts - self._remaining_restarts
        place, self._served, restarts = agree_on_round(worker_group.store, machine, machines, address, used)
        worker_group.master_addr, worker_group.master_port = place.master_addr, place.master_port
        self._remaining_restarts = self._plan.max_restarts - restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        close, has_failed = context.close, False

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = GRACE_AFTER_DEATH) -> None:
            nonlocal has_failed
            if self._is_function:
                for record in context.error_files.values():
                    Path(record).with_name(_ENDING).touch()
            if has_failed:  # torch closes once more; what has ended since the first time was ended here
                close(death_sig, timeout)
                return
            has_failed = death_sig is None
            # Processes that are dead by now failed by themselves; the rest are ended here.
            self._died |= dict.fromkeys(getattr(context, "_failures", ()))
            if death_sig is None and self._are_ending(context):
                self._wait_for_all(context)
                self._died |= {rank: code for rank, code in _exit_codes(context).items() if code}
            by_themselves = _exit_codes(context)
            close(death_sig, timeout)
            # A signal that is sent here after a failure is not an interruption.
            codes = (by_themselves if death_sig is None else _exit_codes(context)).values()
            self.interruption = self.interruption or next((code for code in codes if code and reason_of(code)), None)

        self._died.clear()
        context.close = close_soon
        return ids

    def _are_ending(self, context: PContext) -> bool:
        """Whether a process was interrupted, and so all are: they save together, then end one after the other."""
        ended = {rank: code for rank, code in _exit_codes(context).items() if code}
        return any(reason_of(code) and not Path(context.error_files[rank]).is_file() for rank, code in ended.items())

    def _wait_for_all(self, context: PContext) -> None:
        ends = time.monotonic() + self._plan.shutdown_timeout
        while None in _exit_codes(context).values() and time.monotonic() < ends:
            time.sleep(_POLL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if self._is_function and result.state is WorkerState.HEALTHY:
            result = self._without_result(worker_group) or result
        if result.is_failed() and self._pcontext is not None:
            self._failures = list(self._collect(worker_group, result, self._pcontext))
            if self.interruption is not None:  # an interrupted run is not restarted
                self._remaining_restarts = 0
        return result

    def _without_result(self, worker_group: WorkerGroup) -> RunResult | None:
        """Return the failure of processes that ended with exit code 0 before their function returned."""
        context: Any = self._pcontext
        ended = {rank for rank, code in _exit_codes(context).items() if code == 0}
        failures = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, 0, context.error_files[worker.local_rank])
            for worker in worker_group.workers
            if worker.local_rank in ended
        }
        if not failures:
            return None
        context.close()
        return RunResult(WorkerState.FAILED, failures=failures)

    def _collect(self, worker_group: WorkerGroup, result: RunResult, context: PContext) -> Generator[Failure]:
        for worker in worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            record = Path(context.error_files[worker.local_rank])
            is_only = failure is not None and len(result.failures) == 1
            if record.is_file() or worker.local_rank in self._died or is_only:
                log = context.stderrs[worker.local_rank] or None
                code = self._died.get(worker.local_rank) if failure is None else failure.exitcode
                yield failure_of(worker.global_rank, code, record, log)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failures:
            restart = f"restart {self._plan.max_restarts - self._remaining_restarts} of {self._plan.max_restarts}"
            self._plan.announce(f"{self.failed()}\nStarting all processes again ({restart}).")
        else:  # how many restarts there were is agreed on when the machines meet
            self._plan.announce("Starting all processes again, as another machine does.")
        self._failures.clear()
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        wait_interruptibly(super()._exit_barrier)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException):
            _ignore_repeated_signals()
        try:
            super()._shutdown(death_sig, timeout)
        except SignalException:  # a second signal: do not wait
            super()._shutdown(signal.SIGKILL, 0)
            raise
        finally:
            programs = getattr(self._pcontext, "subprocess_handlers", {})
            if any(handler.proc.poll() for handler in programs.values()):
                kill_leftovers(handler.proc.pid for handler in programs.values())


def is_ending() -> bool:
    """Whether the launcher is ending this process, which runs a function, and the others."""
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(_ENDING).exists()


def _exit_codes(context: Any) -> dict[int, int | None]:
    """Return the exit codes of the processes of this machine; `None` for a running one."""
    programs = getattr(context, "subprocess_handlers", None)
    if programs is not None:
        return {rank: handler.proc.poll() for rank, handler in programs.items()}
    return {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}


def _ignore_repeated_signals() -> None:
    """Ignore a signal that is repeated at once: it may be sent to this process and to its group."""
    began = time.monotonic()

    def ignore_at_first(number: int, frame: FrameType | None) -> None:
        del frame
        if time.monotonic() > began + SAME_REQUEST:
            raise SignalException(f"{signal.Signals(number).name} again", signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in FORWARDED):
            if callable(signal.getsignal(number)):
                signal.signal(number, ignore_at_first)


def _streams(plan: Plan) -> Any:
    try:
        streams = Std.from_str(plan.tee)
    except ValueError:
        raise ConfigurationError(
            f"tee must be 0, 1 (output), 2 (errors) or 3 (both), or these for single processes as in 0:3,1:2 "
            f"(got {plan.tee!r})."
        ) from None
    last = plan.num_processes - 1
    missing = [number for number in streams if number > last] if isinstance(streams, dict) else []
    if missing:
        raise ConfigurationError(
            f"tee={plan.tee!r} names process {missing[0]}, and the last one on this machine is {last}."
        )
    return streams


@contextlib.contextmanager
def _meeting(entry: str | Callable[..., Any], plan: Plan, folder: Path) -> Generator[RendezvousHandler]:
    handler: RendezvousHandler
    if plan.is_local and callable(entry) and plan.start_method == "fork":
        handler = MeetInFile(plan.main_process_port, plan.rdzv_id, folder)
    elif plan.is_local:
        handler = MeetAtPort(plan.main_process_port, plan.rdzv_id)
    else:
        options: dict[str, Any] = {"timeout": 900, **plan.rdzv_conf}
        if plan.rdzv_backend == "static":
            options["rank"] = plan.machine_rank
        elif (is_host := serves_rendezvous(plan.endpoint)) is not None:
            options.setdefault("is_host", str(is_host))
        parameters = RendezvousParameters(
            plan.rdzv_backend,
            plan.endpoint,
            plan.rdzv_id,
            plan.num_machines,
            plan.num_machines,
            local_addr=own_address(plan.endpoint),
            **options,
        )
        try:
            handler = get_rendezvous_handler(parameters)
            if plan.rdzv_backend == "static":
                wait_interruptibly(handler.next_rendezvous)  # the agent's own call finds all machines
        except (RendezvousError, dist.DistError, ValueError) as error:
            raise _not_met(plan, error) from error
    # The store file of this process's own world is not for the processes it starts, nor theirs for this process.
    with environment.patch_environment(trainer_lib_store_file=""):
        try:
            yield handler
        finally:
            handler.shutdown()


def _not_met(plan: Plan, error: Exception) -> WorldError:
    return WorldError(
        f"Machine {plan.machine_rank} of {plan.num_machines} could not join the rendezvous at {plan.endpoint} "
        f"({plan.rdzv_backend}): {str(error).splitlines()[0]} Check that the launcher runs on all machines with the "
        "same options except machine_rank, that they can reach that address, and that no other program uses the port."
    )


@contextlib.contextmanager
def _log_folder(plan: Plan) -> Generator[str]:
    if plan.log_dir is not None:
        yield plan.log_dir
    elif plan.tee != "0":
        yield tempfile.mkdtemp(prefix="trainer_lib_")  # requested logs are kept
    else:
        with tempfile.TemporaryDirectory(prefix="trainer_lib_") as folder:
            yield folder


@contextlib.contextmanager
def _torch_is_quiet(verbose: bool) -> Generator[None]:
    """Silence the agent's log messages: the launcher reports the same, once."""
    names = [] if verbose else [name for name in logging.root.manager.loggerDict if name.startswith(_TORCH_LOGGERS)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def _signals_are_passed_on() -> Generator[None]:
    """Let the agent forward signals, except ignored ones, and restore the handlers afterwards."""
    with restored_handlers() as handlers:
        heeded = ",".join(name for name, handler in handlers.items() if handler is not signal.SIG_IGN)
        try:
            with environment.patch_environment(torchelastic_signals_to_handle=heeded):
                yield
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
