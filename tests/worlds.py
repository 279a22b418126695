"""Worlds of 1 to 4 processes that stay alive between tests: a test on several ranks costs milliseconds, not forks.

`run_world(function, args, num_processes)` takes what `run_forked` takes and gives the same results and errors. The
processes are forked once per pytest worker. Each call starts in a clean state: a new process group, the caller's
environment variables, folder and warning filters, equal random generators. A world in which a rank raised, died, hung
or left a thread, a child or many threads of gloo behind is replaced.

Use `run_forked` instead where the function needs what only a fork inherits: attributes that the test patched, objects
that cannot be pickled, or a process that has to be fresh (signal handlers, kills, `torch.compile`).
"""

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import active_children, current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from time import monotonic, sleep, time_ns
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainer_lib import logging as library_logging
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.launchers.fork import rank_variables
from trainer_lib.launchers.forked_process import begin, leave, refuse_a_world
from trainer_lib.launchers.process_failures import Failure, failed
from trainer_lib.process_group import deadlines
from trainer_lib.processes.exit_codes import exit_code_of
from trainer_lib.processes.ports import free_port
from trainer_lib.state import AcceleratorState, GradientState, PartialState

_OUTPUTS = (1, 2)  # file descriptors
_OTHERS = 0.05  # seconds that other ranks get to report their failures once one has failed
_UNTIL_IDLE = 1.0  # seconds without a call, after which gloo's threads have dropped what the last one sent
_BETWEEN_STACKS = 2.0  # seconds: stacks that differ are of processes that are slow, not hung
# Seconds in which gloo's threads drop the tensors of the last collective, for which they need the interpreter. A
# garbage collection that finds a group waits for these threads, while it holds the interpreter.
_UNTIL_DROPPED = 0.005
_MOST_THREADS = 40  # of a process between calls, those outside of Python too
_TIMED_OUT = 124  # the exit code of `timeout`, in shells


def run_world(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    timeout: float = 60,
    **variables: str,
) -> list[Any]:
    """Run `function(*args)` on every rank of a living world and return the results in order of rank.

    Raises:
        ProcessFailedError: If a rank raised, died or did not finish in time; the message holds its traceback.
    """
    refuse_a_world("run_world")
    if _is_patched():
        raise TypeError(
            "This test patches attributes or dictionaries, which living processes do not see: use run_forked."
        )
    world = _worlds.get(num_processes)
    if world is None or not world.is_alive:
        world = _worlds[num_processes] = _World(num_processes)
    try:
        return world.run(function, args, timeout, variables)
    finally:
        if not world.is_reusable:
            _worlds.pop(num_processes).close()


def watch_patches(patches: pytest.MonkeyPatch) -> None:
    """Refuse to run functions on living processes while a test has patched something other than the environment."""
    global _patches
    _patches = patches


def close_worlds() -> None:
    """End all processes that wait for the next test, and drop the group that was left last, which may hold a port."""
    while _worlds:
        _worlds.popitem()[1].close()
    _left_groups.clear()


def forget_world() -> None:
    """Leave the process group and reset the shared state, as in a process that has just started."""
    # A group that goes while gloo's thread still needs the interpreter, to drop the last collective's tensors, waits
    # for that thread while it holds the interpreter: a deadlock. So a group is kept for a while.
    deadlines().end_thread()
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    if dist.is_initialized():
        dist.destroy_process_group()
    _left_groups[:] = groups
    if "torch.distributed.tensor" in sys.modules:
        _forget_layouts()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    if "accelerate" in sys.modules:
        _forget_state_of_accelerate()


def _forget_state_of_accelerate() -> None:
    """Reset what `transformers.TrainingArguments` has made: models of transformers reduce over ranks where it is."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def _forget_layouts() -> None:
    """Empty torch's caches of layouts.

    Processes that are forked from this one would inherit layouts of the world that was left here. And a cached mesh
    keeps its groups, each with threads of gloo that wake up a hundred times a second.
    """
    import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    redistribute = import_module("torch.distributed.tensor._redistribute")
    redistribute.clear_redistribute_planner_cache()
    redistribute._gen_transform_infos.cache_clear()
    import_module("torch.distributed.tensor._collective_utils").MeshTopoInfo.build_from_mesh.cache_clear()


class _Call(NamedTuple):
    """What a rank is to run, and where."""

    payload: bytes  # of the function and its arguments
    variables: dict[str, str]
    folder: str
    filters: list[Any]


class _Reply(NamedTuple):
    """What came of a call on one rank."""

    result: bytes | None
    error: str | None = None
    exit_code: int = 0
    when: int = 0
    is_clean: bool = True


class _Pickler(cloudpickle.Pickler):
    """Sends functions defined inside others with a reference to their module's names, not with copies of some."""

    def _dynamic_function_reduce(self, func: FunctionType) -> tuple[Any, ...]:
        make, arguments, (state, slots), *rest = super()._dynamic_function_reduce(func)
        module = sys.modules.get(func.__module__)
        if module is None or vars(module) is not func.__globals__:
            return make, arguments, (state, slots), *rest
        code, _, _, _, closure = arguments
        return _function_of_module, (func.__module__, code, closure), (state, {**slots, "__globals__": {}}), *rest


def _function_of_module(module: str, code: CodeType, closure: tuple[CellType, ...] | None) -> FunctionType:
    return FunctionType(code, vars(import_module(module)), None, None, closure)


class _World:
    """Processes of one world size, each with a connection."""

    def __init__(self, size: int) -> None:
        self.is_reusable = True
        self._folder = tempfile.mkdtemp()  # of all temporary files of its processes, which end without cleaning up
        context = get_context("fork")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(target=_serve, args=(os.getpid(), theirs, self._folder))
            process.start()
            theirs.close()
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], timeout: float, variables: Mapping[str, str]
    ) -> list[Any]:
        buffer = io.BytesIO()
        _Pickler(buffer).dump((function, tuple(args)))
        payload = buffer.getvalue()
        size = len(self._processes)
        self.is_reusable = False  # until every rank has answered
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            for rank, (connection, process) in enumerate(zip(self._connections, self._processes, strict=True)):
                place = rank_variables(rank, size, port, folder)
                call = _Call(payload, {**os.environ, **place, **variables}, os.getcwd(), list(warnings.filters))  # noqa: PTH109
                connection.send(call)
                for descriptor in _OUTPUTS:
                    send_handle(connection, descriptor, process.pid)
            replies = self._replies(timeout)
        self.is_reusable = all(reply.is_clean for reply in replies)
        results = [reply.result for reply in replies]
        return [torch.load(io.BytesIO(result), weights_only=False) for result in results if result is not None]

    def _replies(self, timeout: float) -> list[_Reply]:
        replies: dict[int, _Reply] = {}
        failures: dict[int, Failure] = {}
        left = timeout
        while len(replies) + len(failures) < len(self._processes):
            pending = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in replies and rank not in failures
            }
            since, at_most = monotonic(), min(max(left, 0.0), 1.0)
            ready = wait(list(pending), at_most if not failures else _OTHERS)
            left -= min(monotonic() - since, at_most)  # a machine that stood still does not count
            if not ready and failures:
                break
            if not ready and left <= 0:
                raise self._late(sorted(pending.values()), timeout)
            for connection in ready:
                assert isinstance(connection, Connection)
                self._receive(connection, pending[connection], replies, failures)
        if failures:
            raise failed(failures.values(), len(self._processes))
        return [replies[rank] for rank in range(len(self._processes))]

    def _receive(
        self, connection: Connection, rank: int, replies: dict[int, _Reply], failures: dict[int, Failure]
    ) -> None:
        try:
            reply: _Reply = connection.recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            failures[rank] = Failure(rank=rank, exit_code=self._processes[rank].exitcode)
            return
        if reply.error is None:
            replies[rank] = reply
        else:
            failures[rank] = Failure(rank=rank, exit_code=reply.exit_code, traceback=reply.error, when=reply.when)

    def _late(self, ranks: list[int], timeout: float) -> ProcessFailedError:
        for _ in range(2):
            for rank in ranks:
                os.kill(self._processes[rank].pid, signal.SIGUSR2)  # shows its stacks
                sleep(_BETWEEN_STACKS / len(ranks))
        return ProcessFailedError(
            f"Of {len(self._processes)} processes, these did not end within {timeout:g} seconds: "
            f"{', '.join(map(str, ranks))}. Their stacks, twice each, are in the captured output.",
            ranks[0],
            _TIMED_OUT,
        )

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_patched() -> bool:
    return _patches is not None and bool(
        _patches._setattr or any(target is not os.environ for target, _, _ in _patches._setitem)
    )


_worlds: dict[int, _World] = {}
_patches: pytest.MonkeyPatch | None = None
_left_groups: list[dist.ProcessGroup] = []
atexit.register(close_worlds)


# -- in each process of a world ----------------------------------------------------------------------------------------


def _serve(parent: int, connection: Connection, folder: str) -> None:
    for world in _worlds.values():  # those of other sizes, which the parent holds
        for other in world._connections:
            other.close()
    _worlds.clear()
    begin(parent, {}, threads=1)
    tempfile.tempdir = current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    logging.root.handlers = [logging.NullHandler()]  # pytest's would keep every record
    faulthandler.register(signal.SIGUSR2, file=open(2, "w", closefd=False), chain=False)  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
    start = _Start()
    gc.freeze()  # what the parent had imported need not be looked at when garbage is collected
    while True:
        try:
            if not connection.poll(_UNTIL_IDLE):
                _left_groups.clear()  # their threads would wake up a hundred times a second until the next call
            call: _Call = connection.recv()
            for descriptor in _OUTPUTS:
                handle = recv_handle(connection)
                os.dup2(handle, descriptor)
                os.close(handle)
        except EOFError:
            os._exit(0)
        start.restore(call)
        reply = _run(call)
        connection.send(reply)
        if reply.error is not None:
            leave(reply.exit_code)


def _run(call: _Call) -> _Reply:
    buffer = io.BytesIO()
    try:
        function, args = cloudpickle.loads(call.payload)
        torch.save(function(*args), buffer)
        del function, args
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test has to see it
        return _Reply(None, traceback.format_exc(), exit_code_of(error), time_ns())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
    forget_world()
    sleep(_UNTIL_DROPPED)
    gc.collect()
    gc.freeze()  # what is left stays, such as imported modules: the next collection need not look at it
    is_idle = len(list(Path("/proc/self/task").glob("*"))) <= _MOST_THREADS
    is_clean = is_idle and threading.active_count() == 1 and not active_children()
    return _Reply(buffer.getvalue(), is_clean=is_clean)


class _Start:
    """What a process looks like at the start of each call."""

    def __init__(self) -> None:
        self._path, self._argv, self._level = list(sys.path), list(sys.argv), logging.root.level
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self, call: _Call) -> None:
        """Undo what an earlier test changed."""
        os.environ.clear()
        os.environ.update(call.variables)
        os.chdir(call.folder)
        warnings.filters[:] = call.filters  # type: ignore[index]  # it is a list, where tests run
        sys.path[:], sys.argv[:] = self._path, self._argv
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in _OUTPUTS)  # noqa: SIM115
        if logging.root.level != self._level:  # it empties the caches of thousands of loggers
            logging.root.setLevel(self._level)
        library_logging._said_once.clear()
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # otherwise the call imports torch's compiler for nothing
            torch.use_deterministic_algorithms(False)
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack for each type of GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        forget_world()
