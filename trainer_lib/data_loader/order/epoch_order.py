"""The global order of samples in an epoch: torch's, drawn from the random generators, or a function of seed and epoch.

To go to a position, a sampler is replayed from the states of its generators at the start of the epoch, without loading
a sample.
"""

import copy
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from trainer_lib.data_loader.order.data_rng import GLOBAL_GENERATORS, RandomStream, derived_seed
from trainer_lib.data_loader.order.epoch_start import (
    EpochStart,
    EpochStream,
    cloned,
    replaced_generators,
    started,
)
from trainer_lib.data_loader.order.permutation import Positions
from trainer_lib.data_loader.order.samplers import LowMemoryRandomSampler, SeedableRandomSampler
from trainer_lib.data_loader.order.worker_seeds import draw_worker_seed
from trainer_lib.foundation.lengths import length_of

# Samplers that draw random numbers only from the generator passed to them.
_CONTAINED = frozenset({SubsetRandomSampler, WeightedRandomSampler, list, tuple, range})

_CHUNK = 4096  # units skipped at once
_AT_ONCE = 256


class ComputedOrder:
    """An order in which the sample at any position can be looked up, as a function of seed and epoch."""

    draws_from: tuple[str, ...] = ()  # the global generators that the order may draw from

    def open(self, start: EpochStart, stream: EpochStream, of_loader: torch.Generator | None) -> torch.Tensor | None:
        """Draw the seed of the workers; see `ReplayedOrder.open`."""
        del start
        return draw_worker_seed(stream, of_loader)

    def __init__(self, source: "SequentialSampler | SeedableRandomSampler") -> None:
        self.source = source
        self._known: tuple[tuple[int, int, int], Callable[[Positions], Positions]] | None = None

    def length(self) -> int:
        """Return how many samples an epoch has."""
        return len(self.source)

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions to samples."""
        if not isinstance(self.source, SeedableRandomSampler):
            return _same
        key = seed, epoch, self.length()
        if self._known is None or self._known[0] != key:
            self._known = key, self.source.lookup(seed, epoch)
        return self._known[1]


class ReplayedOrder:
    """The order of a sampler that yields one unit after the other.

    Args:
        source: The sampler.
        is_iterated_first: Whether torch makes its iterator before it draws the seed of the workers.
    """

    is_iterated_first: bool
    source: Iterable[Any]

    def __init__(self, source: Iterable[Any], is_iterated_first: bool = False) -> None:
        self.source, self.is_iterated_first = source, is_iterated_first
        self.is_torchs: bool = _is_torchs(source)

    @property
    def draws_on_the_way(self) -> bool:
        """Whether the sampler draws random numbers also after its first unit."""
        source: Any = self.source
        if not self.is_torchs:
            return True
        return iterates_as(source, "RandomSampler") and (source.replacement or len(source) > len(source.data_source))

    @property
    def draws_from(self) -> tuple[str, ...]:
        """The global generators that the order may draw from."""
        if not self.is_torchs:
            return GLOBAL_GENERATORS
        return ("torch",) if getattr(self.source, "generator", self) is None else ()

    def length(self) -> int | None:
        """Return how many units an epoch has; `None` if the sampler has no length."""
        return length_of(self.source)

    def open(self, start: EpochStart, stream: EpochStream, of_loader: torch.Generator | None) -> torch.Tensor | None:
        """Draw what torch's iterator draws before it asks for a batch.

        Returns:
            The state of the loader's generator before the seed of the workers is drawn (see `draw_worker_seed`).
        """
        if self.is_iterated_first and start.seeds_workers:
            stream.iterate(self.source)
        before = draw_worker_seed(stream, of_loader)
        if self.is_iterated_first and start.has_workers:
            stream.iterate(self.source)
        return before

    def replay(self, seed: int, epoch: int, stream: EpochStream | None, remembered: int, at_once: int) -> "Replay":
        """Return the units of an epoch from its start (see `Replay`).

        Args:
            seed: The seed of the order, if it has no stream.
            epoch: The epoch.
            stream: What the sampler draws from; `None`: its generators are seeded from seed and epoch.
            remembered: How many of the first units to keep, at least.
            at_once: How many units to draw in one scope, at least.
        """
        if stream is not None:
            units = stream.begin(self.source)
            if self.is_torchs:  # it has drawn from the global generators all that it will
                if self.draws_from:
                    stream.again(self._draw_first)
                return Replay(units, None)
            return Replay(units, remembered, stream, at_once)
        source = seeded(self.source, derived_seed(seed, epoch, "sampler"))
        if type(source) in _CONTAINED:
            return Replay(source, remembered)
        return Replay(source, remembered, RandomStream(derived_seed(seed, epoch, "order")), at_once)

    def _draw_first(self) -> None:
        source: Any = self.source
        if iterates_as(source, "RandomSampler"):  # draws one seed, however many samples it has
            source = RandomSampler(range(1))
        next(iter(source), None)

    def replay_aside(
        self,
        seed: int,
        epoch: int,
        start: EpochStart | None,
        generators: list[Any],
        of_loader: torch.Generator | None,
        at_once: int = _AT_ONCE,
    ) -> tuple["Replay", dict[int, Any]]:
        """Return the same units once more, without changing any generator, and the copies they are drawn from by id.

        Args:
            seed: The seed of the order, if the epoch has no start.
            epoch: The epoch.
            start: The start of the epoch.
            generators: The generators whose states `start` lists.
            of_loader: The one of them that is the loader's.
            at_once: How many units to draw in one scope, at least.
        """
        order = copy.copy(self)
        order.source = copy.copy(self.source)  # the sampler may count its epochs
        if start is None:
            return order.replay(seed, epoch, None, 0, at_once), {}
        pairs = zip(generators, start.own, strict=True)
        clones = {id(generator): cloned(generator, state) for generator, state in pairs}
        stream = EpochStream(replace(start, is_new=False), follows=False)
        order.source = replaced_generators(order.source, lambda generator: clones[id(generator)])
        order.open(start, stream, clones.get(id(of_loader)))
        return order.replay(seed, epoch, stream, 0, at_once), clones


class Replay:
    """The units of one pass, one after the other from its start.

    Args:
        source: The sampler.
        remembered: How many of the first units to keep in `opening`; `None`: all.
        scope: The context to draw in, which separates its random numbers from those of training.
        at_once: How many units to draw in one scope, at least.
    """

    asked: int

    def __init__(
        self,
        source: Iterable[Any],
        remembered: int | None,
        scope: AbstractContextManager[None] | None = None,
        at_once: int = 1,
    ) -> None:
        self.opening: list[Any] = []
        self.asked = 0  # the units asked of the source; more than there are, once it is at its end
        self._remembered = remembered
        self._scope, self._at_once = scope, at_once
        self._drawn: list[Any] = []
        with scope or nullcontext():
            self._units = started(iter(source))

    def draw(self, count: int) -> list[Any]:
        """Return the next `count` units, or the rest if fewer are left."""
        if self._scope is None:
            units = list(islice(self._units, count))
        elif self._at_once <= count and not self._drawn:
            with self._scope:
                units = list(islice(self._units, count))
            self.asked += count
        else:
            units = self._from_store(count, self._scope)
        if self._remembered is None:
            self.opening += units
        elif (missing := self._remembered - len(self.opening)) > 0:
            self.opening += units[:missing]
        return units

    def _from_store(self, count: int, scope: AbstractContextManager[None]) -> list[Any]:
        if len(self._drawn) < count:
            missing = max(count - len(self._drawn), self._at_once)
            with scope:
                self._drawn += islice(self._units, missing)
            self.asked += missing
        units = self._drawn[:count]
        del self._drawn[:count]
        return units

    def skip(self, count: int) -> None:
        """Skip the next `count` units."""
        while count > 0 and (units := self.draw(min(count, _CHUNK))):
            count -= len(units)


def order_of(batch_sampler: Any) -> ComputedOrder | ReplayedOrder:
    """Return the order in which a sampler or batch sampler yields the units of a pass.

    The units of a plain `BatchSampler` are the samples of the sampler inside.
    """
    by_samples = iterates_as(batch_sampler, "BatchSampler")
    source = batch_sampler.sampler if by_samples else batch_sampler
    if isinstance(source, SeedableRandomSampler) or iterates_as(source, "SequentialSampler"):
        return ComputedOrder(source)  # type: ignore[arg-type]
    is_torchs = by_samples and type(batch_sampler).__iter__.__module__.startswith("torch.")
    return ReplayedOrder(source, is_iterated_first=not is_torchs)


def iterates_as(sampler: Any, kind: str) -> bool:
    """Whether `sampler` has the `__iter__` of torch's (or torchdata's) sampler class named `kind`."""
    iterate = getattr(type(sampler), "__iter__", None)
    return getattr(iterate, "__qualname__", "") == f"{kind}.__iter__" and (
        getattr(iterate, "__module__", "") in ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
    )


def with_samplers(source: Any, seedable: bool, low_memory: bool) -> Any:
    """Return a sampler or batch sampler, with the sampler that was asked for instead of torch's random one.

    Args:
        source: The sampler or batch sampler.
        seedable: Seed the random sampler with seed + epoch, as Accelerate does.
        low_memory: Compute its order instead of listing it.
    """
    if iterates_as(source, "BatchSampler"):
        sampler, source = source.sampler, copy.copy(source)
        source.sampler = with_samplers(sampler, seedable, low_memory)
        return source
    is_random = iterates_as(source, "RandomSampler")
    if low_memory and (is_random or type(source) is SeedableRandomSampler):
        return LowMemoryRandomSampler.like(source)
    return SeedableRandomSampler.like(source) if seedable and is_random else source


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


def samplers_in(source: Any) -> list[Any]:
    """Return a sampler or batch sampler, and those that it names as its `sampler` and `batch_sampler`.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> [type(sampler).__name__ for sampler in samplers_in(BatchSampler(SequentialSampler(range(4)), 2, False))]
        ['BatchSampler', 'SequentialSampler']
    """
    found: list[Any] = []
    waiting = [source]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting += [getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    return found


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


def _is_torchs(sampler: Any) -> bool:
    """Whether a sampler draws as one of torch's: all it draws from a global generator, it draws at its start."""
    kinds = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
    return type(sampler) in (list, tuple, range) or any(iterates_as(sampler, kind) for kind in kinds)


def _same(places: Positions) -> Positions:
    return places
