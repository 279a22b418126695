"""Collectives of a forward and a backward, counted with their bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = "all_gather_into_tensor"
_COLLECTIVES = ("all_reduce", _GATHERS, "reduce_scatter_tensor", "all_to_all_single")


@dataclass(frozen=True)
class Messages:
    """How many collectives one rank takes part in, and the bytes of the whole tensors that they reduce or gather."""

    count: int = 0
    size: int = 0

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(self.count + other.count, self.size + other.size)


class CountedMessages(TorchDispatchMode):
    """Counts the collectives that run in a `with` block, also on the meta device.

    Args:
        ranks: How many ranks take part in each of them.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.messages = Messages()
        self._ranks = ranks

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation on plain tensors; those on distributed ones are taken apart first."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = str(func.name()).partition("::")
        name = name.partition(".")[0]
        if namespace == "_c10d_functional" and name in _COLLECTIVES:
            tensor: torch.Tensor = args[0]
            whole = self._ranks if name == _GATHERS else 1
            self.messages += Messages(1, whole * math.prod(tensor.shape) * tensor.element_size())
        return func(*args, **(kwargs or {}))
