"""Messages between the ranks of a pipeline: activations, their gradients, and the outputs of the last stage."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation.tensors.pytree import map_leaves, map_tensors, tensors
from trainer_lib.strategies.pipeline_parallel.model_stages import Activations

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_HEADER = 12  # numbers: how many tensors follow, type, gradient, dimensions, and at most eight sizes


class TensorSpec(NamedTuple):
    """The shape and type of a tensor, and whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor like it, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class StageExchange:
    """Sends tensors from rank to rank of one pipeline.

    Args:
        group: The ranks of the pipeline.
        device: The device of this rank.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device: torch.device
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send the values of a tensor whose shape the receiver knows."""
        dist.send(tensor.detach().to(self.device).contiguous(), group=self.group, group_dst=to)

    def receive(self, spec: TensorSpec, source: int) -> Tensor:
        """Return the tensor of another rank."""
        tensor = spec.empty(self.device)
        dist.recv(tensor, group=self.group, group_src=source)
        return tensor

    def send_activations(self, activations: Activations, to: int) -> None:
        """Send tensors, each with its shape, its type, and whether it wants a gradient back."""
        for following, tensor in zip(reversed(range(len(activations))), activations, strict=True):
            header = [following, _TYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim(), *tensor.shape]
            header += [0] * (_HEADER - len(header))
            self.send(torch.tensor(header), to)
            self.send(tensor, to)

    def receive_activations(self, source: int) -> Activations:
        """Return the tensors that `send_activations` sent; they require a gradient if their sender wants one."""
        received: list[Tensor] = []
        following = 1
        while following:
            header = self.receive(TensorSpec((_HEADER,), torch.int64, False), source).tolist()
            following, kind, has_gradient, dimensions, *shape = header
            spec = TensorSpec(tuple(shape[:dimensions]), _TYPES[kind], bool(has_gradient))
            received.append(self.receive(spec, source).requires_grad_(spec.has_gradient))
        return tuple(received)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks of the pipeline."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, outputs: Any, source: int) -> tuple[Any, list[Tensor], list[TensorSpec]]:
        """Return the outputs of one rank on all ranks, as a tree of indices, the tensors, and their specs."""
        found: list[Tensor] = []
        message: list[Any] = [None]
        if self.rank == source:
            found = list(tensors(outputs))
            indices = iter(range(len(found)))
            tree = map_tensors(lambda _: _Index(next(indices)), outputs)
            message = [(tree, [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in found])]
        dist.broadcast_object_list(message, group=self.group, group_src=source)
        tree, specs = message[0]
        values = [t.detach().contiguous() for t in found] or [spec.empty(self.device) for spec in specs]
        for value in values:
            dist.broadcast(value, group=self.group, group_src=source)
        return tree, values, specs


class _Index(int):
    """Stands in for a tensor in a tree."""


def with_tensors(tree: Any, values: list[Tensor]) -> Any:
    """Return a tree with tensors in the places of their indices."""
    return map_leaves(lambda leaf: values[leaf] if isinstance(leaf, _Index) else leaf, tree)
