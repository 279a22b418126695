"""`SharedWeights`: weights that several stages hold: their gradients are summed, and count once in a norm."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainer_lib.foundation.tensors.local_shards import laid_out
from trainer_lib.strategies.clip_grad_norm import local_values
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange, TensorSpec


class SharedWeights:
    """The weights of a rank that other ranks of its pipeline hold too, such as a tied embedding and head.

    Args:
        named: The weights of this rank, by the names they have in the whole model.
        exchange: The messages between the ranks. All ranks have to call.
    """

    def __init__(self, named: Mapping[str, Tensor], exchange: StageExchange) -> None:
        self._exchange = exchange
        names_by_rank = exchange.gather_objects(sorted(named))
        self._holders: dict[str, list[int]] = {}
        for name in sorted({name for names in names_by_rank for name in names}):
            holders = [rank for rank, names in enumerate(names_by_rank) if name in names]
            if len(holders) > 1 and exchange.rank in holders:
                self._holders[name] = holders
        self._weights = {name: named[name] for name in self._holders}
        self._trained = {name for name, weight in self._weights.items() if weight.requires_grad}

    @property
    def counted_elsewhere(self) -> set[Tensor]:
        """The weights that count on an earlier rank."""
        return {self._weights[name] for name, holders in self._holders.items() if holders[0] != self._exchange.rank}

    def around_backward(self, backward: Callable[[], None]) -> None:
        """Compute gradients, and sum those of shared weights over the ranks, without what they held before."""
        weights = {name: weight for name, weight in self._weights.items() if self._is_trained(name, weight)}
        before = {name: weight.grad for name, weight in weights.items()}
        for weight in weights.values():
            weight.grad = None
        backward()
        for name, weight in weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else laid_out(weight.grad, weight)
            (values,), earlier = local_values([gradient]), before[name]
            values.copy_(self._summed(name, values))
            if not weight.requires_grad:  # frozen since: an optimizer would still decay it
                weight.grad = earlier
            else:
                weight.grad = gradient if earlier is None else earlier.add_(gradient)

    def _is_trained(self, name: str, weight: Tensor) -> bool:
        """Whether a weight is trained, or was: one that was frozen when prepared may be trained later."""
        if name not in self._trained:
            is_trained = torch.full((), float(weight.requires_grad), device=weight.device)
            if self._summed(name, is_trained):
                self._trained.add(name)
        return name in self._trained

    def _summed(self, name: str, gradient: Tensor) -> Tensor:
        first, *others = self._holders[name]
        spec = TensorSpec(tuple(gradient.shape), gradient.dtype, False)
        if self._exchange.rank != first:
            self._exchange.send(gradient, first)
            return self._exchange.receive(spec, first)
        for rank in others:
            gradient = gradient + self._exchange.receive(spec, rank)
        for rank in others:
            self._exchange.send(gradient, rank)
        return gradient
