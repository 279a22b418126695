"""The messages of a step, counted: each collective and each send, with the bytes that this rank puts in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NOT_MESSAGES = ("wait_tensor", "_wrap_tensor_autograd", "recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class Message(NamedTuple):
    """A kind of message: the operation, and the bytes that the rank gives to it."""

    operation: str
    size: int


class Messages(TorchDispatchMode):
    """Counts the messages that a rank sends in a `with` block, those of DTensors, FSDP2 and DDP too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Message] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation; those on distributed tensors are taken apart first."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = str(func.name()).partition("::")
        name = name.partition(".")[0]
        if namespace in ("c10d", "_c10d_functional") and name not in _NOT_MESSAGES:
            self.counts[Message(_plain(name), _bytes_of(name, args))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def size(self) -> int:
        """The bytes of all messages."""
        return sum(message.size * count for message, count in self.counts.items())


def _plain(name: str) -> str:
    """Return one name for the variants of an operation."""
    name = name.strip("_").removesuffix("_coalesced")
    for variants in (("all_gather", "allgather"), ("all_reduce", "allreduce"), ("reduce_scatter",)):
        if any(name.startswith(variant) for variant in variants):
            return variants[0]
    return "all_to_all" if name.startswith(("all_to_all", "alltoall")) else name


def _bytes_of(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that go in, which several operations of c10d take as their second argument."""
    takes_output_first = name in ("_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_",
                                  "alltoall_base_", "alltoall_", "allgather_into_tensor_coalesced_",
                                  "reduce_scatter_tensor_coalesced_")  # fmt: skip
    return _size(args[1] if takes_output_first else args[0])


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def counted_step(step: Any) -> Counter[Message]:
    """Return the messages of a call."""
    with Messages() as messages:
        step()
    assert torch.is_grad_enabled()
    return messages.counts
