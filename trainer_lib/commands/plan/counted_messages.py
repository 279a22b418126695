"""Collectives and messages of a forward and a backward, counted with their bytes by dimension of the mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import tensors

# Where the whole tensor is in the arguments of an operation; a gathered one is a part of it for each rank.
_SENT = {
    "c10d::allreduce_": 0,
    "c10d::allgather_": 0,
    "c10d::_allgather_base_": 0,
    "c10d::reduce_scatter_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::alltoall_base_": 1,
    "c10d::broadcast_": 0,
    "c10d::send": 0,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::all_to_all_single": 0,
    "_c10d_functional::all_gather_into_tensor": 0,
}
_OF_A_PART = "_c10d_functional::all_gather_into_tensor"


@frozen_dataclass
class Messages:
    """How many messages one rank takes part in, and the bytes of the whole tensors that they move."""

    count: int = 0
    size: int = 0

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(self.count + other.count, self.size + other.size)

    def __mul__(self, times: int) -> "Messages":
        return Messages(self.count * times, self.size * times)


class CountedMessages(TorchDispatchMode):
    """Counts the collectives and the sent tensors that run in a `with` block, also without values.

    Args:
        groups: The process groups by dimension of the mesh.

    Attributes:
        messages: The messages by dimension.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.messages: dict[str, Messages] = {}
        self._dimensions: dict[str | None, tuple[str, int]] = {
            str(group.group_name): (name, group.size()) for name, group in groups.items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation on plain tensors; those on distributed ones are taken apart first."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = str(func.name()).partition(".")[0]
        if name in _SENT:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        found = next((self._dimensions[group] for group in map(_group_name, args) if group in self._dimensions), None)
        if found is None:
            return
        dimension, ranks = found
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(args[_SENT[name]]))
        size *= ranks if name == _OF_A_PART else 1
        self.messages[dimension] = self.messages.get(dimension, Messages()) + Messages(1, size)


def _group_name(argument: Any) -> str | None:
    if isinstance(argument, str):
        return argument
    return dist.ProcessGroup.unbox(argument).group_name if isinstance(argument, torch.ScriptObject) else None
