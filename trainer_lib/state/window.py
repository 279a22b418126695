"""This file is the window: the micro-batches of one update, and what they weigh.

Gradients are made with a nominal weight that is known before the first micro-batch. What the window really weighs
is known with its last one; the quotient of the two is the factor that the gradients are still to be multiplied by.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.gradients import GradientState

Weight = float | Tensor


class Share:
    """What the loss of some optimizers weighs in this window."""

    __slots__ = ("local", "nominal", "total")

    def __init__(self, nominal: float) -> None:
        self.nominal = nominal  # what the losses are divided by before it is known what they weigh
        self.local: Weight = 0.0  # what they weigh on this process so far
        self.total: Weight = 0.0  # what they weigh a process, on average; known once the window is complete

    def factor(self) -> Weight:
        """Return what the gradients are to be multiplied by; 0 if nothing weighed anything."""
        if isinstance(self.total, Tensor):
            return torch.where(self.total > 0, self.nominal / self.total, 0.0)
        return self.nominal / self.total if self.total > 0 else 0.0


class GradientWindow:
    """Counts micro-batches and weights, and tells optimizers the factor that is due."""

    def __init__(self, state: GradientState) -> None:
        self.state = state
        self.size = 1
        self.backwards = 0
        self._backwards_before = -1  # as the micro-batch in hand began; -1: outside `accumulate`
        self._counts: dict[Any, int] = {}
        self._shares: dict[tuple[Hashable, ...], Share] = {}

    @property
    def is_first_micro_batch(self) -> bool:
        """Whether no gradient of an earlier micro-batch is pending."""
        return self.size == 1

    def begin_micro_batch(self, models: tuple[Any, ...]) -> None:
        """Count a micro-batch of `models` and decide whether it updates.

        Each set of models has a window of its own, so two that take turns on the same batches do not count twice.
        """
        state = self.state
        self.size = self._counts.get(models, 0) + 1
        plugin = state.plugin
        last = self.size >= (plugin.num_steps or 1) or (plugin.sync_with_dataloader and state.end_of_dataloader)
        state.sync_gradients = last
        self._counts[models] = 0 if last else self.size
        self._backwards_before = self.backwards

    def end_micro_batch(self) -> None:
        """Leave `accumulate`."""
        self._backwards_before = -1

    def may_zero(self, holds_gradients: bool) -> bool:
        """Whether gradients may be zeroed now: not while they wait for the rest of their window.

        They may if nothing was added since the optimizer stepped, or if the window is complete (and is thrown away).
        """
        complete = self.state.sync_gradients and self.backwards > self._backwards_before
        return complete or not holds_gradients

    def weigh(self, weight: Weight, optimizers: tuple[Hashable, ...], nominal_weight: Callable[[], float]) -> Share:
        """Add `weight` to what the losses of `optimizers` weigh so far."""
        share = self._shares.get(optimizers)
        if share is None:
            for other in self._shares:
                if not set(other).isdisjoint(optimizers):
                    raise ConfigurationError(
                        "One optimizer takes part in weighted losses of different optimizers within one update, so "
                        "its gradients have no single weight. Name the same optimizers in each backward(…, weight=…)."
                    )
            share = self._shares[optimizers] = Share(nominal_weight())
        share.local = share.local + weight
        return share

    def factor(self, optimizer: Hashable) -> Weight:
        """Return what the gradients of `optimizer` are still to be multiplied by."""
        for optimizers, share in self._shares.items():
            if optimizer in optimizers:
                return share.factor()
        # Each micro-batch was divided by the number of steps; a window cut short by the end of the data held fewer.
        return self.state.num_steps / self.size if self._counts else 1.0

    def has_weights(self, optimizer: Hashable) -> bool:
        """Whether the gradients of `optimizer` come from weighted losses."""
        return any(optimizer in optimizers for optimizers in self._shares)

    def forget_weights(self, optimizer: Hashable) -> None:
        """Start anew with the weights of `optimizer`: its gradients are used or thrown away."""
        for optimizers in [key for key in self._shares if optimizer in key]:
            remaining = tuple(other for other in optimizers if other is not optimizer)
            share = self._shares.pop(optimizers)
            if remaining:
                self._shares[remaining] = share

    def reset(self) -> None:
        """Forget all counts and weights."""
        self.__init__(self.state)
