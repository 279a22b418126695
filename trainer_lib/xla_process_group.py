"""The process group of ranks on devices of torch_xla: torch_xla sends what is on devices, gloo what is on hosts."""

import atexit
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation import environment, xla
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, WorldError
from trainer_lib.foundation.launcher_variables import World
from trainer_lib.options.parallel.ddp_options import InitProcessGroupKwargs
from trainer_lib.process_group import LoneProcess, ProcessGroup, TorchProcesses, leave_at_exit

_HOSTS_SEND_BY = "gloo"
_SENT_AS_NUMBERS = {torch.bool: torch.uint8}


class XlaProcesses(TorchProcesses):
    """The ranks of a world on devices of torch_xla.

    A collective on devices is part of a recorded graph, and ranks whose graphs differ wait for each other without end.
    So each gets a graph of its own, which does not depend on what ranks computed or read before.

    Args:
        timeout: How long a collective of the hosts waits for the other ranks; `None`: torch's default.
        group: Another group of all ranks.
    """

    def __init__(self, timeout: timedelta | None = None, group: Any = None) -> None:
        super().__init__(timeout, group)
        self._device = xla.device()

    def barrier(self) -> None:
        """Wait until all ranks have called this, and have sent their work to their devices."""
        xla.sync()
        super().barrier()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place."""
        if tensor.device != self._device:
            return super().all_reduce(tensor, op)
        values = tensor.detach()
        xla.sync()
        xla.all_reduce(values, op)
        xla.sync()
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        if tensor.device != self._device:
            return super().all_gather(tensor)
        values = tensor.detach().to(_SENT_AS_NUMBERS.get(tensor.dtype, tensor.dtype))
        xla.sync()
        gathered = xla.all_gather(values)
        xla.sync()
        return list(gathered.to(tensor.dtype))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of one rank."""
        if tensor.device != self._device:
            return super().broadcast(tensor, source)
        values = tensor.detach().to(_SENT_AS_NUMBERS.get(tensor.dtype, tensor.dtype))
        if self.rank != source:
            values.zero_()  # torch_xla multiplies the others by 0, and 0 times NaN is NaN
        xla.sync()
        xla.broadcast(values, source)
        xla.sync()
        if values.dtype != tensor.dtype:
            tensor.detach().copy_(values)
        return tensor

    def parts(self, ranks: Sequence[Sequence[int]]) -> ProcessGroup:
        """Raise unless each rank is alone: devices send to all ranks.

        Raises:
            UnsupportedError: If some ranks are a group.
        """
        if max(map(len, ranks)) == 1:
            return LoneProcess()
        raise UnsupportedError(
            f"Groups of ranks ({[list(part) for part in ranks]}) do not work on devices of torch_xla, where each rank "
            "holds the whole model. Leave sizes of a ParallelismConfig other than dp_replicate_size at 1."
        )


def form_on_xla(world: World | None, options: InitProcessGroupKwargs) -> ProcessGroup:
    """Form the process group of ranks that a launcher or `torch_xla.launch` started; a lone process without them.

    Args:
        world: The world that the launcher set, if one did.
        options: The options of the group; they count for the hosts.

    Raises:
        ConfigurationError: If the options name another backend.
        WorldError: If the number of ranks is not the requested one.
        UnsupportedError: If this process has several devices.
    """
    if options.backend not in (None, _HOSTS_SEND_BY):
        raise ConfigurationError(
            f"backend={options.backend!r} does not work on devices of torch_xla, which sends their tensors; their "
            f"hosts send by {_HOSTS_SEND_BY!r}. Leave it out."
        )
    xla.load()
    if world is None and xla.world_size() == 1:
        xla.check_one_device()
        return LoneProcess()
    if not dist.is_initialized():
        timeout: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
        method = options.init_method or xla.RENDEZVOUS
        dist.init_process_group(_HOSTS_SEND_BY, init_method=method, **timeout)
        atexit.register(leave_at_exit)
    xla.check_one_device()
    group = XlaProcesses(options.timeout)
    expected = environment.expected_world_size()
    if group.rank != xla.rank() or group.size != xla.world_size() or expected not in (None, group.size):
        raise WorldError(
            f"torch_xla has rank {xla.rank()} of {xla.world_size()} here, torch.distributed rank {group.rank} of "
            f"{group.size}, and {expected or group.size} processes were requested. Start one process for each chip: "
            "`trainer-lib launch --tpu --num_processes CHIPS`."
        )
    return group
