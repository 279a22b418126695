"""This file is the processes that work together, and what they can say to one another.

There is always a group: `LoneProcess` is a world of one, so nobody has to ask whether there are others.
"""

import atexit
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation import environment
from trainer_lib.foundation.environment import World
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.options.ddp_options import InitProcessGroupKwargs

_worlds = itertools.count()  # that this process has been part of
_TIME_FOR_THREADS = 0.1  # seconds
_BETWEEN_LOOKS = 0.02  # seconds
_formed_by: int | None = None  # the process that last became part of a world


class ProcessGroup(Protocol):
    """What processes can do together. Tensors are of one shape and type on all of them."""

    rank: int
    size: int
    backend: str | None

    @property
    def timeout(self) -> timedelta | None:
        """How long one waits for the others; `None` where there are none."""
        ...

    def barrier(self) -> None:
        """Wait until all processes are here."""
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the processes by `sum`, `max` or `min`, in place."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of one process."""
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all processes."""
        ...

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Overwrite the list with that of one process."""
        ...

    def scatter_objects(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return this process's one of the objects that process `source` gives."""
        ...

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Whether all processes come here with the same value within so many seconds; all get the same answer.

        It sends nothing through the group, whose collectives others may be in.
        """
        ...

    def another(self) -> "ProcessGroup":
        """Return a group of the same processes, for messages of another thread. All of them have to ask."""
        ...

    def destroy(self) -> None:
        """Leave the group."""
        ...


class LoneProcess:
    """A world of one."""

    rank = 0
    size = 1
    backend: str | None = None
    timeout: timedelta | None = None

    def barrier(self) -> None:
        """Return at once."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the tensor."""
        del op
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a list of the tensor."""
        return [tensor]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor."""
        _check_rank(source, self.size)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return a list of the object."""
        return [value]

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Return the list."""
        _check_rank(source, self.size)
        return values

    def scatter_objects(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return the only object."""
        _check_rank(source, self.size)
        assert values is not None
        return values[0]

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Return yes."""
        del name, value, patience
        return True

    def another(self) -> "LoneProcess":
        """Return this one, which has nothing to say."""
        return self

    def destroy(self) -> None:
        """Return at once."""


class TorchProcesses:
    """The processes of torch's default group.

    Args:
        timeout: How long one waits for the others; `None`: as torch says.
        group: Another group of all of them.
    """

    def __init__(self, timeout: timedelta | None = None, group: Any = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.backend: str | None = dist.get_backend(group)
        self._timeout, self._group = timeout, group
        self._operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    @property
    def timeout(self) -> timedelta:
        """How long one waits for the others."""
        return self._timeout or dist.distributed_c10d._get_default_timeout(cast(Any, self.backend))

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if "nccl" in str(self.backend):
            dist.barrier(self._group, device_ids=[torch.accelerator.current_device_index()])
        else:
            dist.barrier(self._group)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the processes, in place."""
        with _in_a_row(tensor) as values:
            dist.all_reduce(values, self._operations[op], group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes."""
        tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([_as_bytes(one) for one in gathered], _as_bytes(tensor), group=self._group)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of one process."""
        _check_rank(source, self.size)
        with _in_a_row(tensor) as values:
            dist.broadcast(_as_bytes(values), src=source, group=self._group)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all processes."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Overwrite the list with that of one process."""
        _check_rank(source, self.size)
        dist.broadcast_object_list(values, src=source, group=self._group)
        return values

    def scatter_objects(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return this process's one of the objects that process `source` gives."""
        _check_rank(source, self.size)
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if values is None else list(values), src=source, group=self._group)
        return received[0]

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Whether all processes come here with the same value, as the store tells that brought them together."""
        store = dist.distributed_c10d._get_default_store()
        try:
            # Numbered, so that nothing of an earlier time is taken for an answer.
            time_here = f"{name}/{store.add(f'{name}/times/{self.rank}', 1)}"
            keys = [f"{time_here}/{rank}" for rank in range(self.size)]
            store.set(keys[self.rank], value)
            is_same = _has_all(store, keys, value, patience)
            # One answer for all: that of whoever knows first. A process that gave up has others give up too.
            answer = store.compare_set(f"{time_here}/answer", "", "yes" if is_same else "no")
        except RuntimeError:  # the store is gone, with the process that has it
            return False
        return answer == b"yes"

    def another(self) -> ProcessGroup:
        """Return a group of the same processes, with connections of its own."""
        if self.size == 1:
            return LoneProcess()
        return TorchProcesses(self._timeout, dist.new_group(backend="gloo", timeout=self._timeout))

    def destroy(self) -> None:
        """Leave the group."""
        _let_threads_go()
        dist.destroy_process_group(self._group)
        _forget_layouts()


def form(world: World, device: torch.device, options: InitProcessGroupKwargs) -> ProcessGroup:
    """Bring the processes of `world` together; what torch has brought together already is taken over.

    Raises:
        WorldError: If they do not find one another, or are not as many as asked for.
    """
    if not dist.is_initialized():
        _forget_layouts()
        _bring_together(world, options, _backend(device, options.backend))
        atexit.register(leave_at_exit)
    group = TorchProcesses(options.timeout)
    expected = environment.expected_world_size()
    if group.size != world.size or expected not in (None, group.size):
        size = group.size
        group.destroy()
        raise WorldError(
            f"{expected or world.size} processes were asked for and a world of {size} formed. "
            "Another launcher's variables, or a script that calls init_process_group itself, got in between."
        )
    return group


def form_alone(device: torch.device, options: InitProcessGroupKwargs) -> ProcessGroup:
    """Return a real group of this process alone, for what works on real groups only."""
    if not dist.is_initialized():
        _forget_layouts()
        dist.init_process_group(_backend(device, options.backend), store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_at_exit)
    return TorchProcesses(options.timeout)


def adopted() -> ProcessGroup | None:
    """Return the group that the script itself formed, if it did."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    _forget_layouts()
    return TorchProcesses()


def _bring_together(world: World, options: InitProcessGroupKwargs, backend: str) -> None:
    timeout: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
    if options.init_method is None:
        _check_address(world)
    try:
        if options.init_method is not None:
            where: dict[str, Any] = {"init_method": options.init_method}
        else:
            where = {"store": _store(world, timeout)}
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, **where, **timeout)
        if "gloo" in backend:
            # Who is through first and ends at once would take its connections from under those still making theirs.
            dist.all_reduce(torch.zeros(1))
    except (dist.DistError, ValueError, RuntimeError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        raise WorldError(
            f"Process {world.rank} could not join the world of {world.size} at "
            f"{options.init_method or f'{world.master_addr}:{world.master_port}'} ({world.launcher}, {backend}): "
            f"{str(error).splitlines()[0]} Check that all {world.size} processes are started, that they can reach "
            "that address, and that no other program uses the port."
        ) from error


def _has_all(store: dist.Store, keys: list[str], value: str, patience: float) -> bool:
    ends = time.monotonic() + patience
    while not store.check(keys):  # not wait(), which prints a warning when the time is over
        if time.monotonic() > ends:
            return False
        time.sleep(_BETWEEN_LOOKS)
    return all(store.get(key) == value.encode() for key in keys)


def leave_at_exit() -> None:
    """Leave the world in good order at the end of a program; not after an error: the others may never answer."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        _let_threads_go()
        dist.destroy_process_group()
    _let_threads_go()  # they outlive their group where a model still refers to it


def _let_threads_go() -> None:
    # Gloo's threads give back the tensors of the last collective, for which they need the interpreter. Whoever lets go
    # of the group joins them while it holds the interpreter: both would wait for ever. Once the interpreter is gone
    # they abort the process. Nobody can wait for them, and all they need is that this thread lets them.
    time.sleep(_TIME_FOR_THREADS)


def _forget_layouts() -> None:
    # DTensor caches layouts by mesh, and a mesh of this world may equal one of an earlier world, whose groups are gone.
    # A forked process has no earlier world and must not clear: its parent's groups end threads that it does not have.
    global _formed_by
    if _formed_by == os.getpid() and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    _formed_by = os.getpid()


def _check_address(world: World) -> None:
    if world.size > world.local_size and (world.master_addr is None or world.master_port is None):
        raise ConfigurationError(
            "MASTER_ADDR and MASTER_PORT are not set, so processes on several machines cannot find one another. "
            "Set both to the first machine's address and a free port."
        )


def _store(world: World, timeout: dict[str, Any]) -> dist.Store:
    file = environment.store_file()
    attempt = environment.elastic_attempt()
    store = _file_store(file, world, timeout) if file is not None else _port_store(world, attempt is not None, timeout)
    # Addresses of an earlier world of these processes, or of those that died, would mislead this one.
    return dist.PrefixStore(f"attempt_{attempt or 0}/world_{next(_worlds)}", store)


def _file_store(path: str, world: World, timeout: dict[str, Any]) -> dist.Store:
    store = dist.FileStore(path, world.size)
    if timeout:
        store.set_timeout(timeout["timeout"])
    return store


def _port_store(world: World, served_by_agent: bool, timeout: dict[str, Any]) -> dist.Store:
    default_port = 29500 if world.size > 1 else 0
    return dist.TCPStore(
        world.master_addr or "127.0.0.1",
        default_port if world.master_port is None else world.master_port,
        world.size,
        is_master=world.rank == 0 and not served_by_agent,
        wait_for_workers=False,
        multi_tenant=True,
        **timeout,
    )


def _backend(device: torch.device, asked_for: str | None) -> str:
    fitting = "gloo" if device.type in ("cpu", "mps") else dist.get_default_backend_for_device(device)
    if asked_for is None:
        # With a backend for each kind of device, counts and flags need not travel over the accelerator.
        return fitting if fitting == "gloo" else f"cpu:gloo,{device.type}:{fitting}"
    if device.type == "cpu" and "nccl" in asked_for:
        raise ConfigurationError(f"backend={asked_for!r} cannot work on the CPU. Use 'gloo', or leave it out.")
    return asked_for


@contextlib.contextmanager
def _in_a_row(tensor: Tensor) -> Generator[Tensor]:
    """Lend the values of `tensor` in the order of its dimensions: strides may differ between processes."""
    tensor = tensor.detach()
    values = tensor.contiguous()
    yield values
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)


def _as_bytes(tensor: Tensor) -> Tensor:
    # Gloo knows few of torch's types; on the way it makes no difference what the bytes stand for.
    return tensor.reshape(-1).view(torch.uint8)


def _check_rank(source: int, size: int) -> None:
    if not 0 <= source < size:
        raise ConfigurationError(f"There is no process {source} in a world of {size}. Known: 0 to {size - 1}.")
