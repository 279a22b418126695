"""`notebook_launcher`: run a training function on several processes, from a notebook or a script."""

import contextlib
import functools
import importlib
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, WorldError
from trainer_lib.foundation.imports import is_package_available, pip_install
from trainer_lib.launchers.device_count import check_enough, count_accelerators, forks_are_poisoned
from trainer_lib.launchers.elastic import is_ending, run_elastic
from trainer_lib.launchers.first_device_use import describe_first_use
from trainer_lib.launchers.forked_process import begin, check_call, leave, refuse_a_world, result_of
from trainer_lib.launchers.gpu_selection import peer_settings
from trainer_lib.launchers.launch_plan import LOCALHOST, Plan
from trainer_lib.options.precision_options import check_precision
from trainer_lib.processes.exit_codes import Interrupted

_DEFAULT_PORT = 29500


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = str(_DEFAULT_PORT),
    master_addr: str = LOCALHOST,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Run `function(*args)` on several processes of this machine, and return the results in order of rank.

    With one process the function runs in this process, and its side effects remain.

    Args:
        function: What each process runs. It makes its own Accelerator.
        args: Its arguments.
        num_processes: How many processes on this machine; by default one per accelerator, or one on the CPU.
        mixed_precision: "no", "fp16", "bf16" or "bf16-true".
        use_port: The port of the rendezvous. On a single machine, the default means any free port.
        master_addr: The address of the first machine.
        node_rank: The number of this machine, from 0.
        num_nodes: How many machines; the launcher is called on each.
        rdzv_backend: The rendezvous backend between machines.
        rdzv_endpoint: The address of the rendezvous; by default `master_addr` and `use_port`.
        rdzv_conf: Options of the backend.
        rdzv_id: The name of the rendezvous.
        max_restarts: How often to start all processes again after one has failed.
        monitor_interval: Seconds between two checks for dead processes.
        log_line_prefix_template: The prefix of each output line of a process, such as "[rank ${rank}]: "; it may have
            ${role_name}, ${rank} and ${local_rank}. By default lines have none.

    Raises:
        ProcessFailedError: If a process raised or died; the message holds its traceback.
        SystemExit: If a signal or a deadline ended all processes early; with their exit code.

    Example:
        >>> def count():
        ...     from trainer_lib import PartialState
        ...
        ...     return PartialState().num_processes
        >>> notebook_launcher(count, num_processes=2)
        [2, 2]
    """
    check_call(function, args)
    precision = check_precision(mixed_precision)
    _refuse_a_launched_process()
    accelerators = count_accelerators()
    if num_processes is None:
        num_processes = max(1, accelerators)
    plan = Plan(
        num_processes=num_processes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        main_process_port=_port(use_port, num_nodes),
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=rdzv_conf or {},
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
        announce=_say,
    )
    check_enough(num_processes, accelerators)
    with environment.patch_environment(accelerate_mixed_precision=precision):
        if plan.world_size == 1:
            _say(f"Running {_name(function)} in this process, on {'one accelerator' if accelerators else 'the CPU'}.")
            return [function(*args)]
        return _run_on_processes(function, tuple(args), plan, accelerators)


def _run_on_processes(function: Callable[..., Any], args: tuple[Any, ...], plan: Plan, accelerators: int) -> list[Any]:
    refuse_a_world("notebook_launcher")
    variables = {"trainer_lib_world_size": plan.world_size, "fork_launched": 1}
    variables |= peer_settings(plan.num_processes, accelerators)
    with environment.patch_environment(**variables), _prefixed_lines(plan) as plan:
        if accelerators and forks_are_poisoned():
            threads = max(1, len(os.sched_getaffinity(0)) // plan.num_processes)
            call = _pickled(functools.partial(function, *args))
            results = run_elastic(_call_pickled, (os.getpid(), call, threads), replace(plan, start_method="spawn"))
        else:
            results = run_elastic(_call, (os.getpid(), functools.partial(function, *args)), plan)
    return [torch.load(io.BytesIO(result), weights_only=False) for result in results]


@contextlib.contextmanager
def _prefixed_lines(plan: Plan) -> Generator[Plan]:
    """Let output pass through files if its lines get a prefix; a failure names the files and keeps them."""
    if plan.log_line_prefix_template is None:
        yield plan
        return
    folder = tempfile.mkdtemp(prefix="trainer_lib_")
    yield replace(plan, tee="3", log_dir=folder)
    shutil.rmtree(folder)


def _call(parent: int, function: Callable[[], Any], threads: int = 1) -> bytes:
    # One thread in a fork: OpenMP's threads do not survive it, and a parallel region would wait for them without end.
    try:
        begin(parent, {}, threads)
        result = io.BytesIO()
        torch.save(result_of(function), result)
        if is_ending():  # an interrupted function has returned, and nobody takes its result
            leave(0)
        return result.getvalue()
    except Interrupted as stop:
        leave(stop.exit_code)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        get_error_handler().record_exception(error)
        leave()


def _call_pickled(parent: int, pickled: bytes, threads: int) -> bytes:
    # What cloudpickle writes, pickle reads.
    return _call(parent, pickle.loads(pickled), threads)  # noqa: S301 - it comes from the parent process


def _pickled(function: Callable[[], Any]) -> bytes:
    if not is_package_available("cloudpickle"):
        raise MissingPackageError(
            "This process has already used the accelerator (moved a tensor there, or only called "
            f"torch.cuda.is_available()), so forked processes cannot use it. {describe_first_use()}Restart the kernel "
            "and use it only in the launched function, or install cloudpickle "
            f"({pip_install('cloudpickle')}): then fresh processes are started instead."
        )
    return importlib.import_module("cloudpickle").dumps(function)


def _port(use_port: str | int, num_nodes: int) -> int:
    try:
        port = int(use_port)
    except ValueError:
        raise ConfigurationError(f"use_port must be a number from 0 to 65535 (got {use_port!r}).") from None
    return 0 if port == _DEFAULT_PORT and num_nodes == 1 else port


def _refuse_a_launched_process() -> None:
    world = environment.read_world()
    if world is not None:
        raise WorldError(
            f"notebook_launcher starts processes, and this already is rank {world.rank} of {world.size}, started by "
            f"{world.launcher}. Call the function itself."
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _say(message: str) -> None:
    print(message, flush=True)  # noqa: T201 - shown below the notebook's cell
