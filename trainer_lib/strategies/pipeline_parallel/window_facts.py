"""`WindowFacts`: the losses and weights of a window, from the last stage to all ranks, in one small message."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import map_leaves
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange, with_tensors


@frozen_dataclass
class _Number:
    """Stands in for a number in a structure: its type, and the type of a tensor."""

    kind: type
    dtype: torch.dtype | None


class WindowFacts:
    """Broadcasts nested numbers; their structure travels only when it changes.

    Args:
        exchange: The messages between the ranks.
    """

    def __init__(self, exchange: StageExchange) -> None:
        self._exchange = exchange
        self._structure: Any = None
        self._count = 0  # of the numbers in it

    def share(self, facts: Any, source: int) -> Any:
        """Return the facts of rank `source` on all ranks."""
        exchange, structure = self._exchange, self._structure
        packed = torch.ones(self._count + 1, dtype=torch.float64, device=exchange.device)
        if exchange.rank == source:
            structure, numbers = _taken_apart(facts)
            if structure is not None and structure == self._structure:
                packed = _packed([0.0, *numbers], exchange.device)
        dist.broadcast(packed, group=exchange.group, group_src=source)
        if packed[0]:
            tree, values, _ = exchange.share(facts, source)
            facts = with_tensors(tree, values)
            self._structure, numbers = _taken_apart(facts)
            self._count = len(numbers)
            return facts
        return facts if exchange.rank == source else _put_together(structure, packed[1:])


def _taken_apart(facts: Any) -> tuple[Any, list[Any]]:
    """Return a structure with its numbers replaced, and the numbers; no structure if it has other tensors."""
    numbers: list[Any] = []
    fits = True

    def replaced(leaf: Any) -> Any:
        nonlocal fits
        is_tensor = isinstance(leaf, Tensor)
        if not is_tensor and type(leaf) not in (float, int, bool):
            return leaf
        fits = fits and not (is_tensor and leaf.dim()) and not (type(leaf) is int and abs(leaf) > 2**53)
        numbers.append(leaf)
        return _Number(type(leaf), leaf.dtype if is_tensor else None)

    structure = map_leaves(replaced, facts)
    return (structure, numbers) if fits else (None, [])


def _packed(numbers: list[Any], device: torch.device) -> Tensor:
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])


def _put_together(structure: Any, packed: Tensor) -> Any:
    values, tensors = iter(packed.tolist()), iter(packed.unbind())

    def restored(leaf: Any) -> Any:
        if not isinstance(leaf, _Number):
            return leaf
        value, tensor = next(values), next(tensors)
        return leaf.kind(value) if leaf.dtype is None else tensor.to(leaf.dtype)

    return map_leaves(restored, structure, lambda part: isinstance(part, _Number))
