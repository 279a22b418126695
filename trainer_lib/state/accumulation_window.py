"""This file is the window: the micro-batches of one update, and what they weigh.

Gradients are made with a nominal weight that is known before the first micro-batch. What the window really weighs
is known with its last one; the quotient of the two is the factor that the gradients are still to be multiplied by.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.gradient_state import GradientState

Weight = float | Tensor

_COUNTS = ("backwards", "micro_batch", "began", "size", "steps", "is_fresh", "_is_counted", "_backwards_before")


def nan_if_negative(weight: Tensor) -> Tensor:
    """Return a weight on an accelerator, where an error would wait for it: NaN spoils the update, as infinity does."""
    return torch.where(weight < 0, torch.nan, weight)


class Share:
    """What the loss of some optimizers weighs in this window."""

    __slots__ = ("local", "nominal", "total")

    def __init__(self, nominal: float) -> None:
        self.nominal = nominal  # what the losses are divided by before it is known what they weigh
        self.local: Weight = 0.0  # what they weigh on this process so far
        self.total: Weight | None = None  # what they weigh a process, on average; known once the window is complete

    def factor(self) -> Weight:
        """Return what the gradients are to be multiplied by; 0 if nothing weighed anything."""
        if self.total is None:
            raise ConfigurationError(
                "The micro-batch that updates had no backward(…, weight=…), so gradients and weights of the processes "
                "were not put together. Where it has nothing to learn from, call "
                "accelerator.backward(outputs.sum() * 0, weight=0)."
            )
        if isinstance(self.total, Tensor):
            # Infinity times 0 is NaN: an infinite weight spoils the update, instead of making it 0.
            return torch.where(self.total == 0, 0.0, self.nominal / self.total + 0 * self.total)
        return self.nominal / self.total if self.total else 0.0


class GradientWindow:
    """Counts micro-batches and weights, and tells optimizers the factor that is due.

    Args:
        state: The window that all can see.
        is_alone: Whether there is one process only, which knows what its losses weigh without asking others.
    """

    def __init__(self, state: GradientState, is_alone: bool = True) -> None:
        self.state = state
        self.is_alone = is_alone
        self.waits_for_all = False  # a window ends early only with the data of all processes, not with this one's
        self.notes: Sequence[Weight] = ()  # what else the processes tell each other with the weights of an update
        self.heard: Sequence[Weight] = ()  # the averages of that
        self.reset()

    def reset(self) -> None:
        """Forget all counts and weights."""
        self.backwards = 0
        self.micro_batch = 0  # the number of the one in hand
        self.began = 0  # the number of its window's first one
        self.size = 1  # the micro-batches of its window so far
        self.steps = 1  # what each loss of its window is divided by
        self.is_fresh = True  # no window at all has gradients of an earlier micro-batch
        self._inside = False
        self._is_counted = False  # by `accumulate`; else the script counts, and knows what it divides by
        self._backwards_before = 0
        self._counts: dict[Any, int] = {}
        self._beginnings: dict[Any, int] = {}
        self._shares: dict[tuple[Hashable, ...], Share] = {}

    def state_dict(self, models: Sequence[Any], optimizers: Sequence[Hashable]) -> dict[str, Any]:
        """Return where the window stands, with models and optimizers by their places in the lists."""
        windows = [[_places(key, models), size, self._beginnings[key]] for key, size in self._counts.items()]
        shares = [[_places(key, optimizers), share.nominal, share.local] for key, share in self._shares.items()]
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "syncs": self.state.sync_gradients, "windows": windows, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any], models: Sequence[Any], optimizers: Sequence[Hashable]) -> None:
        """Go on where `state_dict` stood."""
        self.reset()
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.state.sync_gradients = state["syncs"]
        for places, size, began in state["windows"]:
            key = tuple(models[place] for place in places)
            self._counts[key], self._beginnings[key] = size, began
        for places, nominal, local in state["shares"]:
            share = self._shares[tuple(optimizers[place] for place in places)] = Share(nominal)
            share.local = local

    def begin_micro_batch(self, models: tuple[Any, ...]) -> None:
        """Count a micro-batch of `models` and decide whether it updates.

        Each set of models has a window of its own, so two that take turns on the same batches do not count twice.
        """
        state, plugin, counts = self.state, self.state.plugin, self._counts
        size = counts.get(models, 0) + 1
        self.micro_batch += 1
        if size == 1:
            self._beginnings[models] = self.micro_batch
            self.steps = plugin.num_steps or 1
            self.is_fresh = not any(counts.values())
        else:
            self.is_fresh = False
        last = size >= (plugin.num_steps or 1) or (
            plugin.sync_with_dataloader
            and state.end_of_dataloader
            and not (self.waits_for_all and state.others_read_on)
        )
        state.sync_gradients = last
        counts[models] = 0 if last else size
        self.size, self.began = size, self._beginnings[models]
        self._inside = self._is_counted = True
        self._backwards_before = self.backwards

    def end_micro_batch(self) -> None:
        """Leave `accumulate`."""
        self._inside = False

    def unfinished(self) -> list[Any]:
        """Return the models that have gradients of a window that is not complete."""
        return [model for models, size in self._counts.items() if size for model in models]

    def weights_so_far(self) -> list[tuple[tuple[Hashable, ...], Weight]]:
        """Return what the losses weigh so far, by the optimizers they are for."""
        return [(optimizers, share.local) for optimizers, share in self._shares.items()]

    def take_over(self, state: Mapping[str, Any], models: Sequence[Any]) -> None:
        """Count on from where the `state_dict` of another process stands; what losses weigh here stays."""
        self.state.sync_gradients = state["syncs"]
        self._counts.clear()
        for places, size, _ in state["windows"]:
            key = tuple(models[place] for place in places)
            self._counts[key] = size
            self._beginnings.setdefault(key, self.micro_batch)

    def begin_backward(self) -> None:
        """Count a backward; outside of `accumulate` it is a micro-batch of a window that the script counts itself."""
        self.backwards += 1
        if not self._inside:
            self.size, self.steps, self.is_fresh, self._is_counted = 1, self.state.num_steps, True, False

    def may_zero(self, stepped: bool, zeroes_first: bool, holds_gradients: bool) -> bool:
        """Whether an optimizer may zero its gradients now: not while they wait for the rest of their window.

        Args:
            stepped: Whether its `step` was called in this micro-batch; then the window is through, or goes on.
            zeroes_first: Whether it zeroed before its `step` as the window began: then it does so each time.
            holds_gradients: Whether a loss was differentiated since it last updated.
        """
        updates = self.state.sync_gradients
        if not self._inside:
            return updates or not holds_gradients
        if stepped:
            return updates
        # Instead of a step, the gradients of a complete window are thrown away.
        thrown_away = updates and not zeroes_first and self.backwards > self._backwards_before
        return self.size == 1 or thrown_away

    def share_of(self, optimizers: tuple[Hashable, ...]) -> Share | None:
        """Return what the losses of `optimizers` weigh so far, if there were any."""
        return self._shares.get(optimizers)

    def open_share(self, optimizers: tuple[Hashable, ...], nominal_weight: float) -> Share:
        """Begin to count what the losses of `optimizers` weigh."""
        for other in self._shares:
            if not set(other).isdisjoint(optimizers):
                raise ConfigurationError(
                    "One optimizer takes part in weighted losses of different optimizers within one update, so "
                    "its gradients have no single weight. Name the same optimizers in each backward(…, weight=…)."
                )
        share = self._shares[optimizers] = Share(nominal_weight)
        return share

    def factor(self, optimizer: Hashable) -> Weight:
        """Return what the gradients of `optimizer` are still to be multiplied by."""
        for optimizers, share in self._shares.items():
            if optimizer in optimizers:
                if self.is_alone:
                    share.total = share.local
                return share.factor()
        # Each micro-batch was divided by the number of steps; a window cut short by the end of the data held fewer.
        return self.steps / self.size if self._is_counted else 1.0

    def has_weights(self, optimizer: Hashable) -> bool:
        """Whether the gradients of `optimizer` come from weighted losses."""
        return bool(self._shares) and any(optimizer in optimizers for optimizers in self._shares)

    def forget_weights(self, optimizer: Hashable) -> None:
        """Start anew with the weights of `optimizer`: its gradients are used or thrown away."""
        if not self._shares or self._shares.pop((optimizer,), None) is not None:  # alone, as most are
            return
        for optimizers in [key for key in self._shares if optimizer in key]:
            remaining = tuple(other for other in optimizers if other is not optimizer)
            share = self._shares.pop(optimizers)
            if remaining:
                self._shares[remaining] = share


def _places(key: tuple[Any, ...], things: Sequence[Any]) -> list[int]:
    return [place for one in key for place, thing in enumerate(things) if thing is one]
