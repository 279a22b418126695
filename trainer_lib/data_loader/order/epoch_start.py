"""The random generators at the start of an epoch, from which the order of its samples follows."""

import copy
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from itertools import chain, islice, repeat
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from trainer_lib.data_loader.order.data_rng import (
    GLOBAL_GENERATORS,
    RandomStream,
    derived_seed,
    global_generator,
    is_generator,
)
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_WITHOUT_GENERATOR = "without_generator"  # in states of what generators of numpy draw their bits from


@frozen_dataclass(kw_only=True)
class EpochStart:
    """The states of random generators at the start of an epoch, as numbers and texts.

    Args:
        own: Of the generators that the loader and its samplers hold.
        shared: Of the global generators that the order may draw from, by name.
        seeds_workers: Whether torch draws the seed of the workers first, from the loader's generator.
        has_workers: Whether workers read, for which torch makes the iterator of a sampler again.
        is_new: Whether the epoch starts now, instead of being resumed.
    """

    own: list[Any] = field(default_factory=list[Any])
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    seeds_workers: bool = True
    has_workers: bool = False
    is_new: bool = True

    @classmethod
    def now(cls, generators: list[Any], shared: tuple[str, ...], **workers: bool) -> "EpochStart":
        """Return the states that generators have now."""
        own = [state_of(generator) for generator in generators]
        return cls(own=own, shared={name: state_of(global_generator(name)) for name in shared}, **workers)

    def restore(self, generators: list[Any]) -> None:
        """Set the loader's generators to their states at the start."""
        for generator, state in zip(generators, self.own, strict=True):
            if state_of(generator) != state:
                set_state(generator, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, for a checkpoint."""
        workers = {"seeds_workers": self.seeds_workers, "has_workers": self.has_workers}
        return {"own": self.own, "shared": self.shared, **workers}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "EpochStart":
        """Return the start that `state_dict` describes."""
        return cls(**state, is_new=False)


class EpochStream:
    """The global generators, as the order of one epoch draws from them.

    The first draws, in which torch's samplers draw all, start from the states in `start`. Where training's generators
    have these states, they advance, as they do with a plain loader; elsewhere (on a resume, and on a rank whose
    generators differ from rank 0's) they stay unchanged; on such a rank `again` lets them advance too. After
    `separate`, draws come from a stream of their own, so that what training draws in the meantime does not change the
    order.

    Args:
        start: The start of the epoch.
        follows: Whether training's generators may advance.
    """

    start: "EpochStart"

    def __init__(self, start: EpochStart, follows: bool = True) -> None:
        self.start, self._states, self._follows = start, dict(start.shared), follows
        self._outside: dict[str, Any] = {}
        self._is_beside = False
        self._iterator: Iterator[Any] | None = None
        self._later: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self._later is not None:
            self._later.__enter__()
            return
        for name, state in self._states.items():
            current = state_of(global_generator(name))
            if not self._follows or current != state:
                self._outside[name] = current
                set_state(global_generator(name), state)

    def __exit__(self, *error: Any) -> None:
        if self._later is not None:
            self._later.__exit__(*error)
            return
        self._states = {name: state_of(global_generator(name)) for name in self._states}
        for name, state in self._outside.items():
            set_state(global_generator(name), state)
        self._is_beside = "torch" in self._outside
        self._outside = {}

    def again(self, draw: Callable[[], Any]) -> None:
        """Draw once more, from training's torch generator, if the last block left it unchanged on this rank.

        So it advances on each rank as it does with a plain loader, whose order would be another one there.
        """
        if self._is_beside and self._follows and self.start.is_new:
            draw()

    def separate(self) -> None:
        """From now on, draw from a stream of its own."""
        if self._later is not None:
            return
        if len(self._states) == len(GLOBAL_GENERATORS):
            self._later = RandomStream(derived_seed(0, *(repr(state) for state in self._states.values())))
        else:  # torch's samplers do not draw from the global generators again
            self._later = nullcontext()

    def iterate(self, source: Any) -> None:
        """Make the iterator of a sampler, which may draw random numbers; `begin` returns the last one made."""
        with self:
            self._iterator = started(iter(source))

    def begin(self, source: Any) -> Iterator[Any]:
        """Return the iterator of a sampler or dataset; its first unit is drawn at once."""
        with self:
            iterator = started(iter(source)) if self._iterator is None else self._iterator
            first = list(islice(iterator, 1))
        self.separate()
        return chain(first, iterator)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of the stream, if it is separate."""
        return self._later.state_dict() if isinstance(self._later, RandomStream) else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in `state`."""
        self._later = RandomStream(0)
        self._later.load_state_dict(state)


def started(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the rest of another one, of which only `next` is called, as torch does.

    An object whose `__iter__` starts over and returns itself would start over in each `islice`, `chain` and `for`.

    Example:
        >>> samples = started(iter([1, 2, 3]))
        >>> next(samples), list(samples)
        (1, [2, 3])
    """
    return map(next, repeat(iterator))


def generators_of(sampler: Any, outer: tuple[Any, ...] = ()) -> list[Any]:
    """Return the random generators that a sampler and the samplers inside it hold."""
    found: list[Any] = []
    for value in cast("dict[str, Any]", getattr(sampler, "__dict__", {})).values():
        if is_generator(value):
            found.append(value)
        elif isinstance(value, Sampler) and not any(value is other for other in (*outer, sampler)):
            found += generators_of(value, (*outer, sampler))
    return found


def generators_of_loader(loader: DataLoader[Any]) -> list[Any]:
    """Return the random generators that a loader and its samplers hold."""
    samplers = [sampler for sampler in (loader.sampler, loader.batch_sampler) if sampler is not None]
    own = [] if loader.generator is None else [loader.generator]
    return [*own, *(generator for sampler in samplers for generator in generators_of(sampler))]


@contextmanager
def generators_kept(generators: Iterable[Any]) -> Generator[None]:
    """Restore random generators after the block."""
    generators = unique(generators)
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def unique(generators: Iterable[Any]) -> list[Any]:
    """Return the generators without repeats."""
    return list({id(generator): generator for generator in generators}.values())


def cloned(generator: Any, state: Any) -> Any:
    """Return another generator of the same kind, in a state."""
    clone = generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)
    set_state(clone, state)
    return clone


def made_from(state: Any) -> Any:
    """Return a new generator in a state that `state_of` returned."""
    if isinstance(state, str):
        made: Any = torch.Generator()
    elif isinstance(state, list):
        made = random.Random()
    elif "has_gauss" in state:
        made = np.random.RandomState()
    else:
        bits = getattr(np.random, state["bit_generator"])()
        made = bits if _WITHOUT_GENERATOR in state else np.random.Generator(bits)
    set_state(made, state)
    return made


def state_of(generator: Any) -> Any:
    """Return the state of a generator as numbers and texts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, np.random.BitGenerator):
        return {**_plain(generator.state), _WITHOUT_GENERATOR: True}
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if hasattr(generator, "getstate"):  # Python's
        return _plain(generator.getstate())
    return _plain(generator.get_state(legacy=False))


def is_state_of(generator: Any, state: Any) -> bool:
    """Whether `set_state` can set a generator to a state."""
    return _kind(state_of(generator)) == _kind(state)


def _kind(state: Any) -> tuple[Any, ...]:
    return (*sorted(state), state["bit_generator"]) if isinstance(state, dict) else (type(state), len(state))


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    elif (bits := _bits_of(generator)) is not None:
        bits.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    else:
        generator.set_state(state)


def reseed(generator: Any, seed: int) -> None:
    """Set a generator to the start of the numbers that follow from `seed`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif (bits := _bits_of(generator)) is not None:
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed & 0xFFFFFFFF)


def _bits_of(generator: Any) -> Any:
    """Return what a generator of numpy draws its bits from; `None` for others."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator if isinstance(generator, np.random.BitGenerator) else None


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in cast("dict[str, Any]", state).items()}
    if isinstance(state, (np.ndarray, np.generic)):
        return state.tolist()
    return [_plain(value) for value in cast("tuple[Any, ...]", state)] if isinstance(state, tuple) else state


def replaced_generators(sampler: Any, replace: Callable[[Any], Any], outer: tuple[Any, ...] = ()) -> Any:
    """Return the sampler with other generators, also in the samplers inside it; a copy if it has any."""
    changed: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", getattr(sampler, "__dict__", {})).items():
        new = value
        if is_generator(value):
            new = replace(value)
        elif isinstance(value, Sampler) and not any(value is other for other in (*outer, sampler)):
            new = replaced_generators(value, replace, (*outer, sampler))
        if new is not value:
            changed[name] = new
    if not changed:
        return sampler
    duplicate = copy.copy(sampler)
    duplicate.__dict__.update(changed)
    return duplicate
