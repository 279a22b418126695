"""The global order of samples in a pass, as a function of seed and epoch.

The orders of torch's samplers are computed. A user's sampler is replayed, without loading a sample.
"""

import copy
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from trainer_lib.data_loader.order.data_rng import RandomStream, derived_seed
from trainer_lib.data_loader.order.permutation import Positions
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler
from trainer_lib.foundation.lengths import length_of

# Samplers that draw random numbers only from the generator passed to them.
_CONTAINED = frozenset({SubsetRandomSampler, WeightedRandomSampler, list, tuple, range})

_CHUNK = 4096  # units skipped at once


class ComputedOrder:
    """An order in which the sample at any position can be computed."""

    def __init__(self, source: "SequentialSampler | SeedableRandomSampler") -> None:
        self.source = source

    def length(self) -> int:
        """Return how many samples a pass has."""
        return len(self.source)

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions to samples."""
        return self.source.lookup(seed, epoch) if isinstance(self.source, SeedableRandomSampler) else _same


class ReplayedOrder:
    """The order of a sampler that yields one unit after the other."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def length(self) -> int | None:
        """Return how many units a pass has; `None` if the sampler has no length."""
        return length_of(self.source)

    def replay(self, seed: int, epoch: int, remembered: int, at_once: int) -> "Replay":
        """Return the units of a pass from its start (see `Replay`)."""
        source = seeded(self.source, derived_seed(seed, epoch, "sampler"))
        if type(source) in _CONTAINED:
            return Replay(source, remembered)
        return Replay(source, remembered, RandomStream(derived_seed(seed, epoch, "order")), at_once)


class Replay:
    """The units of one pass, one after the other from its start.

    Args:
        source: The sampler.
        remembered: How many of the first units to keep in `opening`.
        scope: The context to draw in, which separates its random numbers from those of training.
        at_once: How many units to draw in one scope, at least.
    """

    def __init__(
        self,
        source: Iterable[Any],
        remembered: int,
        scope: AbstractContextManager[None] | None = None,
        at_once: int = 1,
    ) -> None:
        self.opening: list[Any] = []
        self._remembered = remembered
        self._scope = scope or nullcontext()
        self._at_once = at_once
        self._drawn: list[Any] = []
        with self._scope:
            self._units = iter(source)

    def draw(self, count: int) -> list[Any]:
        """Return the next `count` units, or the rest if fewer are left."""
        if self._at_once <= count and not self._drawn:
            with self._scope:
                units = list(islice(self._units, count))
        else:
            units = self._from_store(count)
        missing = self._remembered - len(self.opening)
        if missing > 0:
            self.opening += units[:missing]
        return units

    def _from_store(self, count: int) -> list[Any]:
        if len(self._drawn) < count:
            with self._scope:
                self._drawn += islice(self._units, max(count - len(self._drawn), self._at_once))
        units = self._drawn[:count]
        del self._drawn[:count]
        return units

    def skip(self, count: int) -> None:
        """Skip the next `count` units."""
        while count > 0 and (units := self.draw(min(count, _CHUNK))):
            count -= len(units)


def order_of(source: Iterable[Any]) -> ComputedOrder | ReplayedOrder:
    """Return the order in which a sampler (or batch sampler) yields the units of a pass."""
    if isinstance(source, SeedableRandomSampler) or iterates_as(source, "SequentialSampler"):
        return ComputedOrder(source)  # type: ignore[arg-type]
    return ReplayedOrder(source)


def iterates_as(sampler: Any, kind: str) -> bool:
    """Whether `sampler` has the `__iter__` of torch's (or torchdata's) sampler class named `kind`."""
    iterate = getattr(type(sampler), "__iter__", None)
    return getattr(iterate, "__qualname__", "") == f"{kind}.__iter__" and (
        getattr(iterate, "__module__", "") in ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
    )


def seedable(sampler: Any) -> Any:
    """Return the sampler; for torch's random sampler, one whose order is a function of seed and epoch."""
    if iterates_as(sampler, "RandomSampler"):
        return SeedableRandomSampler.like(sampler)
    return sampler


def seeded(sampler: Any, seed: int, outer: tuple[Any, ...] = ()) -> Any:
    """Return the sampler with its generators, and those of samplers inside it, seeded from `seed`.

    It is a copy if it has generators: the user's objects do not change. `outer` are the samplers that contain it.
    """
    replaced: dict[str, Any] = {}
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    for name, value in attributes.items():
        new = _seeded_value(value, derived_seed(seed, name), (*outer, sampler))
        if new is not value:
            replaced[name] = new
    if type(sampler) in _CONTAINED and "generator" in attributes:
        replaced["generator"] = torch.Generator().manual_seed(derived_seed(seed, "generator"))
    if not replaced:
        return sampler
    duplicate = copy.copy(sampler)
    duplicate.__dict__.update(replaced)
    return duplicate


def announce_epoch(epoch: int, *listeners: Any) -> None:
    """Call `set_epoch` on each listener that has it."""
    for listener in listeners:
        set_epoch = getattr(listener, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _seeded_value(value: Any, seed: int, outer: tuple[Any, ...]) -> Any:
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.default_rng(seed)
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(np.random.MT19937(seed))
    if type(value) is random.Random:
        return random.Random(seed)
    if isinstance(value, Sampler) and not any(value is sampler for sampler in outer):
        return seeded(value, seed, outer)
    return value


def _same(places: Positions) -> Positions:
    return places
