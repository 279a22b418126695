"""Process groups: collectives between ranks, on tensors and objects.

There is always a group: `LoneProcess` is a world of one, so callers need not check the world size.
"""

import atexit
import contextlib
import copyreg
import io
import itertools
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation import environment
from trainer_lib.foundation.device_types import default_backend, needs_accelerator
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.foundation.launcher_variables import World
from trainer_lib.foundation.tensors.tensor_operations import as_bytes, plain
from trainer_lib.options.parallel.ddp_options import InitProcessGroupKwargs

if TYPE_CHECKING:
    from trainer_lib.processes.deadlines import Deadlines

# Bytes of the message in which ranks tell the lengths of their objects: most objects fit, and need no second message.
_FIRST_MESSAGE = 1024
_HEADER = 8
_LONGEST_IN_FIRST = _FIRST_MESSAGE - _HEADER
_worlds = itertools.count()  # that this process has been part of
_TIME_FOR_THREADS = 0.1  # seconds
_TIME_TO_JOIN = 30.0  # seconds, until a warning says which ranks are missing
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.25  # seconds
_formed_by: int | None = None  # the pid of the process that last joined a world


class ProcessGroup(Protocol):
    """The collectives of a group of ranks. Tensors have the same shape and type on all ranks."""

    rank: int
    size: int
    backend: str | None

    @property
    def timeout(self) -> timedelta | None:
        """How long a collective waits for the other ranks; `None` in a world of one."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks by `sum`, `max` or `min`, in place."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of one rank."""
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks."""
        ...

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Overwrite the list with that of one rank."""
        ...

    def scatter_objects(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return this rank's object of those that rank `source` passes."""
        ...

    def store(self, name: str) -> dist.Store:
        """Return the part under this name of the store that the ranks share.

        It sends nothing through the group, since other ranks may be in one of its collectives.
        """
        ...

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Whether all ranks call this with the same value within so many seconds; all get the same answer.

        It sends nothing through the group, since other ranks may be in one of its collectives.
        """
        ...

    def noticed_after(self, seconds: float, notice: Callable[[], object]) -> AbstractContextManager[object]:
        """Return a block of collectives; if it waits longer than this for other ranks, a thread calls `notice`."""
        ...

    def another(self) -> "ProcessGroup":
        """Return a group of the same ranks, for messages of another thread. All ranks have to call this."""
        ...

    def parts(self, ranks: Sequence[Sequence[int]]) -> "ProcessGroup":
        """Return the group of these ranks that this rank is in; each rank is in one. All ranks have to call this."""
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

    def store(self, name: str) -> dist.Store:
        """Return a new store."""
        del name
        return dist.HashStore()

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Return `True`."""
        del name, value, patience
        return True

    def noticed_after(self, seconds: float, notice: Callable[[], object]) -> AbstractContextManager[object]:
        """Return a block that waits for nobody."""
        del seconds, notice
        return contextlib.nullcontext()

    def another(self) -> "LoneProcess":
        """Return this group, which sends no messages."""
        return self

    def parts(self, ranks: Sequence[Sequence[int]]) -> "LoneProcess":
        """Return this group: there is one rank."""
        del ranks
        return self

    def destroy(self) -> None:
        """Return at once."""


class TorchProcesses:
    """The ranks of torch's default group, or of another one.

    Args:
        timeout: How long a collective waits for the other ranks; `None`: torch's default.
        group: Another group, of all ranks or of some. Ranks count within it.
    """

    def __init__(self, timeout: timedelta | None = None, group: Any = None) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.backend: str | None = dist.get_backend(group)
        self._timeout, self._group = timeout, group
        self._operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    @property
    def timeout(self) -> timedelta:
        """How long a collective waits for the other ranks."""
        # torch has no public question for its default.
        default_of = dist.distributed_c10d._get_default_timeout  # pyright: ignore[reportPrivateUsage]
        return self._timeout or default_of(cast(Any, self.backend))

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if needs_accelerator(str(self.backend)):
            dist.barrier(self._group, device_ids=[torch.accelerator.current_device_index()])
        else:
            dist.barrier(self._group)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place."""
        with _contiguous(tensor) as values:
            dist.all_reduce(values, self._operations[op], group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        tensor = plain(tensor.detach())
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        # As bytes: gloo supports few of torch's types.
        dist.all_gather([as_bytes(part) for part in gathered], as_bytes(tensor), group=self._group)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of one rank."""
        _check_rank(source, self.size)
        with _contiguous(tensor) as values:
            dist.broadcast(as_bytes(values), group_src=source, group=self._group)
        return tensor

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks."""
        pickled = _pickled(value)
        messages = self._all_gather_bytes(_first_message(pickled), _FIRST_MESSAGE)
        longest = max(map(_length, messages))
        if longest > _LONGEST_IN_FIRST:
            pickles = self._all_gather_bytes(pickled, longest)
        else:
            pickles = [message[_HEADER:] for message in messages]
        return [_unpickled(data) for data in pickles]  # what follows is ignored

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Overwrite the list with that of one rank."""
        _check_rank(source, self.size)
        pickled = _pickled(list(values)) if self.rank == source else b""
        message = self._broadcast_bytes(_first_message(pickled), _FIRST_MESSAGE, source)
        length = _length(message)
        data = self._broadcast_bytes(pickled, length, source) if length > _LONGEST_IN_FIRST else message[_HEADER:]
        if self.rank != source:
            values[:] = _unpickled(data)
        return values

    def scatter_objects(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return this rank's object of those that rank `source` passes."""
        _check_rank(source, self.size)
        pickles = [_pickled(value) for value in values or ()]
        lengths = torch.tensor([*map(len, pickles)] or [0] * self.size, device=self._message_device)
        dist.broadcast(lengths, group_src=source, group=self._group)
        longest = int(lengths.max())
        received = self._message(b"", longest)
        sent = [self._message(pickled, longest) for pickled in pickles]
        dist.scatter(received, sent or None, group_src=source, group=self._group)
        data = received.cpu().numpy().data[: int(lengths[self.rank])]
        return _unpickled(data)

    def store(self, name: str) -> dist.Store:
        """Return the part of the world's store under this name for these ranks."""
        return dist.PrefixStore(f"{name}/{dist.get_process_group_ranks(self._group)}", _default_store())

    def meet(self, name: str, value: str, patience: float) -> bool:
        """Whether all ranks call this with the same value, according to the store of the world."""
        store = self.store(name)
        try:
            # Numbered, so that a value of an earlier call is not mistaken for an answer.
            call = store.add(f"times/{self.rank}", 1)
            keys = [f"{call}/{rank}" for rank in range(self.size)]
            store.set(keys[self.rank], value)
            is_same = _has_all(store, keys, value, patience)
            # All ranks use the first answer: when one rank gives up, all do.
            answer = store.compare_set(f"{call}/answer", "", "yes" if is_same else "no")
        except RuntimeError:  # the store is gone, with the process that serves it
            return False
        return answer == b"yes"

    def noticed_after(self, seconds: float, notice: Callable[[], object]) -> AbstractContextManager[object]:
        """Call `notice` on a thread if the block takes longer than this."""
        return deadlines().call_after(seconds, notice)

    def _all_gather_bytes(self, data: bytes, size: int) -> list[memoryview]:
        sent = self._message(data, size)
        received = sent.new_empty(self.size, size)
        dist.all_gather(list(received), sent, group=self._group)
        return [row.numpy().data for row in received.cpu()]

    def _broadcast_bytes(self, data: bytes, size: int, source: int) -> memoryview:
        sent = self._message(data, size)
        dist.broadcast(sent, group_src=source, group=self._group)
        return sent.cpu().numpy().data

    def _message(self, data: bytes, size: int) -> Tensor:
        # In torch's memory: gloo's threads would need the interpreter to free Python's.
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        message.numpy().data[: len(data)] = data
        return message.to(self._message_device)

    @property
    def _message_device(self) -> torch.device:
        # Such as "cpu:gloo,cuda:nccl". From host memory, where the group has a backend for it.
        devices = [pair.partition(":")[0] for pair in dist.get_backend_config(self._group).split(",")]
        return torch.device("cpu" if "cpu" in devices else devices[0])

    def another(self) -> ProcessGroup:
        """Return a group of the same ranks, with separate connections."""
        ranks = dist.get_process_group_ranks(self._group)
        group = dist.new_group(
            ranks, self._timeout, "gloo", use_local_synchronization=self.size < dist.get_world_size()
        )
        return TorchProcesses(self._timeout, group)

    def parts(self, ranks: Sequence[Sequence[int]]) -> ProcessGroup:
        """Return the group of these ranks that this rank is in; each rank is in one. All ranks have to call this."""
        if max(map(len, ranks)) == 1:
            return LoneProcess()
        group, _ = dist.new_subgroups_by_enumeration([list(part) for part in ranks], self._timeout)
        return TorchProcesses(self._timeout, group)

    def destroy(self) -> None:
        """Leave the group."""
        deadlines().end_thread()
        _wait_for_gloo_threads()
        dist.destroy_process_group(self._group)
        _forget_layouts()


@cache
def deadlines() -> "Deadlines":
    """Return the deadlines of this process, for collectives that other ranks may not reach."""
    from trainer_lib.processes.deadlines import Deadlines  # a lone process does without

    return Deadlines()


def form(world: World, device: torch.device, options: InitProcessGroupKwargs) -> ProcessGroup:
    """Form the process group of `world`; a default group that torch already has is used.

    Raises:
        WorldError: If the ranks do not find each other, or the world size differs from the requested one.
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
            f"The world size is {size}, and {expected or world.size} processes were requested. Remove the environment "
            "variables of another launcher, and do not call init_process_group in the script."
        )
    return group


def form_alone(device: torch.device, options: InitProcessGroupKwargs) -> ProcessGroup:
    """Return a real process group of size 1, for code that needs a real group."""
    if not dist.is_initialized():
        _forget_layouts()
        dist.init_process_group(_backend(device, options.backend), store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_at_exit)
    return TorchProcesses(options.timeout)


def requested_world() -> World | None:
    """Return the world that the launcher set.

    A group that the script has formed counts more than variables of a scheduler: Ray may run in a SLURM job.

    Raises:
        ConfigurationError: If the variables of two launchers contradict each other, and there is no group yet.
    """
    world = environment.read_world()
    if not exists():
        environment.refuse_contradicting_launchers()
    elif world is not None and world.launcher != "torchrun" and not _is_the_group(world):
        return None
    return world


def exists() -> bool:
    """Whether torch has a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_on_machine(group: ProcessGroup) -> int:
    """Return how many lower ranks of a group are on this machine. All ranks have to call this."""
    if group.size == 1:
        return 0
    store = dist.PrefixStore(f"machines_{next(_worlds)}", _default_store())
    store.set(str(group.rank), socket.gethostname())
    machines = [store.get(str(rank)) for rank in range(group.rank + 1)]
    return machines[:-1].count(machines[-1])


def adopted() -> ProcessGroup | None:
    """Return the group that the script itself formed; `None` if it did not."""
    if not exists():
        return None
    _forget_layouts()
    return TorchProcesses()


def _is_the_group(world: World) -> bool:
    return (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())


def _default_store() -> dist.Store:
    # torch returns the store of the world under a private name only.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _bring_together(world: World, options: InitProcessGroupKwargs, backend: str) -> None:
    timeout: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
    if options.init_method is None:
        _check_address(world)
    from trainer_lib.processes.join_warning import JoinWarning  # a lone process does without

    address = options.init_method or f"{world.master_addr}:{world.master_port}"
    warning = JoinWarning(world, address, _TIME_TO_JOIN)
    try:
        with deadlines().call_after(_TIME_TO_JOIN, warning.log):
            if options.init_method is not None:
                where: dict[str, Any] = {"init_method": options.init_method}
            else:
                where = {"store": warning.reached(_store(world, timeout))}
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, **where, **timeout)
            if "gloo" in backend:
                # A rank that ends at once would close its connections while others are still connecting.
                dist.all_reduce(torch.zeros(1))
    except (dist.DistError, ValueError, RuntimeError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        raise WorldError(
            f"Rank {world.rank} could not join the world of {world.size} at "
            f"{address} ({world.launcher}, {backend}): "
            f"{str(error).splitlines()[0]} Check that all {world.size} processes are started, that they can reach "
            "that address, and that no other program uses the port."
        ) from error


def _has_all(store: dist.Store, keys: list[str], value: str, patience: float) -> bool:
    # Not wait(), which prints a warning when the time is over.
    is_complete = any(store.check(keys) for _ in looks(patience))
    return is_complete and all(store.get(key) == value.encode() for key in keys)


def looks(seconds: float) -> Generator[None]:
    """Yield for this many seconds, at least once, and sleep in between: at first shortly, then a part of the wait."""
    begun = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - begun
        if waited > seconds:
            return
        time.sleep(min(max(waited / 20, _SHORTEST_SLEEP), _LONGEST_SLEEP))


def leave_at_exit() -> None:
    """Leave the world at the end of a program; not after an error, since other ranks may never answer."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        _wait_for_gloo_threads()
        dist.destroy_process_group()
    _wait_for_gloo_threads()  # they outlive their group if a model still refers to it


def _wait_for_gloo_threads() -> None:
    # Gloo's threads release the tensors of the last collective, for which they need the interpreter lock. The thread
    # that destroys the group joins them while it holds the lock: a deadlock. After the interpreter has ended, they
    # abort the process. There is no call to wait for them, but while this thread sleeps they get the lock.
    time.sleep(_TIME_FOR_THREADS)


def _forget_layouts() -> None:
    # DTensor caches layouts by mesh, and a mesh of this world may equal one of an earlier world, whose groups are
    # destroyed. A forked process must not clear the cache: its parent's groups would join threads it does not have.
    global _formed_by
    if _formed_by == os.getpid() and "torch.distributed.tensor" in sys.modules:
        # Documented by torch, under a private name.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]

        _clear_sharding_prop_cache()
    _formed_by = os.getpid()


def _check_address(world: World) -> None:
    if world.size > world.local_size and (world.master_addr is None or world.master_port is None):
        raise ConfigurationError(
            "MASTER_ADDR and MASTER_PORT are not set, so ranks on several machines cannot find each other. "
            "Set both to the first machine's address and a free port."
        )


def _store(world: World, timeout: dict[str, Any]) -> dist.Store:
    file = environment.store_file()
    attempt = environment.elastic_attempt()
    number = next(_worlds)
    if file is not None:  # one for each world: who leaves a world last removes its file, while others join the next one
        store = _file_store(f"{file}_{number}", world, timeout)
    else:
        store = _port_store(world, attempt is not None, timeout)
    # A prefix, so that addresses of an earlier world, or of dead processes, are not used.
    return dist.PrefixStore(f"attempt_{attempt or 0}/world_{number}", store)


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


def _backend(device: torch.device, requested: str | None) -> str:
    default = default_backend(device.type)
    if requested is None:
        # With a backend for each device type, counts and flags are not sent over the accelerator.
        return default if default == "gloo" else f"cpu:gloo,{device.type}:{default}"
    if device.type == "cpu" and needs_accelerator(requested):
        raise ConfigurationError(f"backend={requested!r} does not work on the CPU. Use 'gloo', or leave it out.")
    return requested


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced_tensor}
    pickler.dump(value)
    return buffer.getvalue()


def _unpickled(data: Any) -> Any:
    return pickle.loads(data)  # noqa: S301 - ranks of this program wrote it, which run the same code


def _reduced_tensor(tensor: Tensor) -> Any:
    """Return how to pickle a tensor. torch cannot read pickles of its newer types, such as uint16 and float8."""
    if tensor.dtype in _TYPES_IN_PICKLES or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return _tensor_of_bytes, (as_bytes(tensor.detach().cpu()), tensor.dtype, tensor.shape)


def _tensor_of_bytes(values: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return values.view(dtype).reshape(shape)


_TYPES_IN_PICKLES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128, torch.qint8, torch.quint8, torch.qint32}
)


def _first_message(pickled: bytes) -> bytes:
    """Return the length of an object and, if it fits, the object."""
    return len(pickled).to_bytes(_HEADER, "little") + (pickled if len(pickled) <= _LONGEST_IN_FIRST else b"")


def _length(message: memoryview) -> int:
    return int.from_bytes(message[:_HEADER], "little")


@contextlib.contextmanager
def _contiguous(tensor: Tensor) -> Generator[Tensor]:
    """Yield the values of `tensor` in the order of its dimensions: strides may differ between ranks."""
    tensor = tensor.detach()
    values = plain(tensor)
    yield values
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)


def _check_rank(source: int, size: int) -> None:
    if not 0 <= source < size:
        raise ConfigurationError(f"Rank {source} does not exist in a world of {size}. Known: 0 to {size - 1}.")
