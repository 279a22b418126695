"""The accumulation window: the micro-batches of one update, and the weights of their losses.

Backward uses a nominal weight, which is known before the first micro-batch. The real weight of the window is known at
its last micro-batch. Before the update, gradients are multiplied by nominal weight / real weight.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count

if TYPE_CHECKING:
    from trainer_lib.state.gradient_state import GradientState


Weight = float | Tensor

_COUNTS = (
    "backwards",
    "micro_batch",
    "micro_batches",
    "began",
    "steps",
    "is_fresh",
    "_is_counted",
    "_backwards_before",
    "_first_step",
    "_phase",
)
_EARLIER_NAMES = {"micro_batches": "size"}  # in checkpoints of earlier versions
_LATER_COUNTS = ("_first_step", "_phase")  # that checkpoints of earlier versions do not have


def nan_if_negative(weight: Tensor) -> Tensor:
    """Return the weight, or NaN if it is negative: raising would have to wait for the accelerator."""
    return torch.where(weight < 0, torch.nan, weight)


def sum_from_mean(mean: Tensor, weight: Weight) -> Tensor:
    """Return the sum behind a mean; 0 if the weight is 0, where the mean is 0 / 0."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, mean * weight, 0.0)
    return mean * weight if weight else mean.nan_to_num() * 0.0


class Message(Protocol):
    """What else ranks tell each other with the weights of an update."""

    def note_loss(self, loss: Weight) -> None:
        """Take the loss of a window that a pipeline has computed at once."""
        ...

    def to_floats(self) -> Sequence[Weight]:
        """Return the message as numbers, as many on all ranks."""
        ...

    def receive(self, means: Sequence[Weight]) -> None:
        """Take the means of these numbers over all ranks."""
        ...


class Share:
    """The weight of the losses for some optimizers in this window."""

    __slots__ = ("local", "nominal", "total")

    def __init__(self, nominal: float) -> None:
        self.nominal: float = nominal  # the divisor of the losses while their weight is unknown
        self.local: Weight = 0.0  # the weight on this rank so far
        self.total: Weight | None = None  # the mean weight per rank; known once the window is complete

    def factor(self) -> Weight:
        """Return the factor of the gradients; 0 if the total weight is 0."""
        if self.total is None:
            raise ConfigurationError(
                "The last micro-batch of the window had no backward(…, weight=…), so gradients and weights were not "
                "reduced across ranks. If the micro-batch has no targets, call "
                "accelerator.backward(outputs.sum() * 0, weight=0)."
            )
        if isinstance(self.total, Tensor):
            # Infinity times 0 is NaN: with an infinite weight the update is NaN, not 0.
            return torch.where(self.total == 0, 0.0, self.nominal / self.total + 0 * self.total)
        return self.nominal / self.total if self.total else 0.0


class GradientWindow:
    """Counts micro-batches and weights, and computes the factor of the gradients.

    Args:
        state: The public state of gradient accumulation.
        num_ranks: The world size; the weights of a single rank need no reduction.

    Attributes:
        message: What ranks tell each other with the weights of the next update; `None`: nothing else.
        is_local: Whether gradients, weights and the message stay on this rank: it is the only one, or they are not due.
    """

    micro_batch: int
    began: int
    backwards: int
    is_fresh: bool
    micro_batches: int
    steps: int

    def __init__(self, state: "GradientState", num_ranks: int = 1) -> None:
        self.state = state
        self._num_ranks = num_ranks
        self.is_local: bool = num_ranks == 1
        self.on_second_micro_batch: Callable[[], None] | None = None  # called before its forward
        self.waits_for_all = False  # only the end of the data of all ranks ends a window early, not that of this rank
        self.reset()

    def reset(self) -> None:
        """Forget all counts and weights."""
        self.message: Message | None = None
        self.backwards = 0
        self.micro_batch = 0  # the number of the current micro-batch
        self.began = 0  # the number of the first micro-batch of its window
        self.micro_batches = 1  # of its window so far
        self.steps = 1  # the divisor of each loss of its window
        self.is_fresh = True  # no window has gradients of an earlier micro-batch
        self._inside = False
        self._is_counted = False  # by `accumulate`; otherwise the script counts, and divides its losses itself
        self._backwards_before = 0
        self._first_step = 0  # the micro-batch from which `step` counts
        self._phase = 0  # the micro-batches that count into the first window of each set of models
        self._counts: dict[Any, int] = {}
        self._beginnings: dict[Any, int] = {}
        self._shares: dict[tuple[Hashable, ...], Share] = {}
        self._nominal: tuple[Any, int, float] = (None, 0, 1.0)  # of a loader and a number of micro-batches

    @property
    def step(self) -> int:
        """The micro-batches of `accumulate` since the last window that the end of the data cut short.

        A value that you set counts as so many micro-batches: the current window has the rest of the division by
        `num_steps`. Gradients stay as they are.
        """
        return self.micro_batch - self._first_step

    @step.setter
    def step(self, step: int) -> None:
        check_count("step", step, at_least=0)
        self._first_step = self.micro_batch - step
        self._phase = step % self.state.num_steps
        self._counts.clear()

    def state_dict(self, models: Sequence[Any], optimizers: Sequence[Hashable]) -> dict[str, Any]:
        """Return the state of the window, with models and optimizers as indices into the lists."""
        windows = [[_indices(key, models), size, self._beginnings[key]] for key, size in self._counts.items()]
        shares = [[_indices(key, optimizers), share.nominal, share.local] for key, share in self._shares.items()]
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "syncs": self.state.sync_gradients, "windows": windows, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any], models: Sequence[Any], optimizers: Sequence[Hashable]) -> None:
        """Restore the state from `state_dict`."""
        self.reset()
        for name in _COUNTS:
            if name in state or name not in _LATER_COUNTS:
                setattr(self, name, state[_EARLIER_NAMES[name] if name not in state else name])
        self.state.sync_gradients = state["syncs"]
        for indices, size, began in state["windows"]:
            key = tuple(models[index] for index in indices)
            self._counts[key], self._beginnings[key] = size, began
        for indices, nominal, local in state["shares"]:
            share = self._shares[tuple(optimizers[index] for index in indices)] = Share(nominal)
            share.local = local

    def begin_micro_batch(self, models: tuple[Any, ...]) -> None:
        """Count a micro-batch of `models`, and decide whether it is the last of its window.

        Each set of models has its own window, so two sets that take turns on the same batches do not count twice.
        """
        state, plugin, counts = self.state, self.state.plugin, self._counts
        size = counts.get(models, self._phase) + 1
        self.micro_batch += 1
        if size == 1 or models not in counts:
            self._beginnings[models] = self.micro_batch
            self.steps = plugin.num_steps or 1
            self.is_fresh = not any(counts.values())
        else:
            self.is_fresh = False
            if self.on_second_micro_batch is not None and (size == 2 or self._phase):
                self.on_second_micro_batch()
        last = size >= (plugin.num_steps or 1) or (
            plugin.sync_with_dataloader
            and state.end_of_dataloader
            and not (self.waits_for_all and state.others_read_on)
        )
        state.sync_gradients = last
        counts[models] = 0 if last else size
        if last:
            self._phase = 0
            if size < (plugin.num_steps or 1):
                self._first_step = self.micro_batch
        self.micro_batches, self.began = size, self._beginnings[models]
        self._inside = self._is_counted = True
        self._backwards_before = self.backwards

    def end_micro_batch(self) -> None:
        """Leave `accumulate`."""
        self._inside = False

    def unfinished(self) -> list[Any]:
        """Return the models that hold gradients of an incomplete window."""
        return [model for models, size in self._counts.items() if size for model in models]

    def weights_so_far(self) -> list[tuple[tuple[Hashable, ...], Weight]]:
        """Return the weights of the losses so far, by optimizers."""
        return [(optimizers, share.local) for optimizers, share in self._shares.items()]

    def take_over(self, state: Mapping[str, Any], models: Sequence[Any]) -> None:
        """Continue the counts from the `state_dict` of another rank; the weights of this rank stay."""
        self.state.sync_gradients = state["syncs"]
        self._counts.clear()
        for indices, size, _ in state["windows"]:
            key = tuple(models[index] for index in indices)
            self._counts[key] = size
            self._beginnings.setdefault(key, self.micro_batch)

    def begin_backward(self) -> None:
        """Count a backward; outside of `accumulate` the script counts the micro-batches itself."""
        self.backwards += 1
        if not self._inside:
            self.micro_batches, self.steps, self.is_fresh, self._is_counted = 1, self.state.num_steps, True, False

    def may_zero(self, stepped: bool, zeroes_first: bool, holds_gradients: bool) -> bool:
        """Whether an optimizer may zero its gradients now: not in the middle of their window.

        Args:
            stepped: Whether its `step` was called in this micro-batch; then only a complete window may be zeroed.
            zeroes_first: Whether it was zeroed before its `step` at the start of the window: then it is each time.
            holds_gradients: Whether there was a backward since its last update.
        """
        updates = self.state.sync_gradients
        if not self._inside:
            return updates or not holds_gradients
        if stepped:
            return updates
        # The gradients of a complete window are dropped instead of a step.
        are_dropped = updates and not zeroes_first and self.backwards > self._backwards_before
        return self.micro_batches == 1 or are_dropped

    def share_of(self, optimizers: tuple[Hashable, ...]) -> Share | None:
        """Return the weight of the losses of `optimizers` so far; `None` if there were none."""
        return self._shares.get(optimizers)

    def only_share(self) -> Share:
        """Return what the losses weigh so far, where all optimizers share them."""
        (share,) = self._shares.values()
        return share

    def open_share(self, optimizers: tuple[Hashable, ...]) -> Share:
        """Start to sum the weights of the losses of `optimizers`."""
        for other in self._shares:
            if not set(other).isdisjoint(optimizers):
                raise ConfigurationError(
                    "An optimizer takes part in weighted losses of different sets of optimizers within one update, so "
                    "its gradients have no single weight. Name the same optimizers in each backward(…, weight=…)."
                )
        share = self._shares[optimizers] = Share(self._nominal_weight())
        return share

    def factor(self, optimizer: Hashable) -> Weight:
        """Return the factor by which the gradients of `optimizer` have yet to be multiplied."""
        for optimizers, share in self._shares.items():
            if optimizer in optimizers:
                if self.is_local:
                    share.total = share.local
                return share.factor()
        # Each loss was divided by the number of steps; a window ended by the end of the data has fewer micro-batches.
        return self.steps / self.micro_batches if self._is_counted else 1.0

    def has_weights(self, optimizer: Hashable) -> bool:
        """Whether the gradients of `optimizer` come from weighted losses."""
        return bool(self._shares) and any(optimizer in optimizers for optimizers in self._shares)

    def forget_weights(self, optimizer: Hashable) -> None:
        """Reset the weights of `optimizer`: its gradients were used or dropped."""
        if not self._shares or self._shares.pop((optimizer,), None) is not None:  # it shares no weights, as usual
            return
        for optimizers in [key for key in self._shares if optimizer in key]:
            remaining = tuple(other for other in optimizers if other is not optimizer)
            share = self._shares.pop(optimizers)
            if remaining:
                self._shares[remaining] = share

    def _nominal_weight(self) -> float:
        """Return the nominal weight of a window: the divisor of this rank's weighted losses in `backward`."""
        loader, steps = self.state.active_dataloader, self.state.num_steps
        if self._nominal[:2] != (loader, steps):  # otherwise the value of the last window still holds
            batch = (getattr(loader, "total_batch_size", None) or self._num_ranks) / self._num_ranks
            self._nominal = (loader, steps, batch * steps)
        return self._nominal[2]


def _indices(key: tuple[Any, ...], items: Sequence[Any]) -> list[int]:
    return [index for member in key for index, item in enumerate(items) if item is member]
