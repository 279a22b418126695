"""The random generators that datasets, their transforms and collate functions hold.

Each has a name: the path of attributes that leads to it, such as `dataset.transform.rng`.
"""

import functools
import os
import sysconfig
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer_lib.data_loader.order.data_rng import is_generator, is_global
from trainer_lib.data_loader.order.epoch_start import is_state_of, made_from, set_state, state_of
from trainer_lib.foundation.public_names.signatures import names_in

_MOST_OBJECTS = 4096
_LONGEST = 256  # longer containers hold data, not transforms
_SEQUENCES = (list, tuple, deque, set, frozenset)
_CONTAINERS = (dict, *_SEQUENCES)
_DATA = frozenset({bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray})
_PARTS_OF_MODULES = vars(nn.Module()).keys() - {"_modules"}  # parameters, buffers, hooks
_ENGINES = {"trainer_lib.accelerator.accelerator", "trainer_lib.trainer.trainer"}
_PLAIN = (*_DATA, type, types.ModuleType, DataLoader)

_remembered = functools.lru_cache(maxsize=256)  # of classes, which a notebook defines again and again


class Held(NamedTuple):
    """A random generator, and the attribute or entry of an object that holds it."""

    holder: Any
    key: Any
    generator: Any


class _Place(NamedTuple):
    """An attribute or entry of an object, and its value, which may be or hold a generator."""

    path_of_holder: str
    step: str  # how the path continues
    holder: Any
    key: Any
    value: Any

    @property
    def path(self) -> str:
        return self.path_of_holder + self.step.format(self.key)

    @property
    def is_nested_container(self) -> bool:
        return issubclass(type(self.value), _CONTAINERS) and issubclass(type(self.holder), _CONTAINERS)


class HeldGenerators:
    """The random generators that objects hold, also in the objects, containers and functions inside them.

    Args:
        roots: The objects, by name.

    Example:
        >>> import random
        >>> from functools import partial
        >>> collate = partial(map, random.Random(0).choice)
        >>> [*HeldGenerators({"collate_fn": collate}).by_path()]
        ['collate_fn.args[0].__self__']
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots

    def by_path(self) -> dict[str, Held]:
        """Return the generators that there are now, each once, by a path to it."""
        return self._walk()[0]

    def generators(self) -> list[Any]:
        """Return the generators that there are now."""
        return [held.generator for held in self.by_path().values()]

    def states(self) -> dict[str, Any]:
        """Return the states of the generators by path, as numbers and texts."""
        return {path: state_of(held.generator) for path, held in self.by_path().items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators to the states of their paths.

        Where a path holds `None`, since its owner makes a generator when it first draws, it gets a generator. A state
        whose path does not exist, or has a generator of another kind, belongs to other data and is left out.
        """
        found, empty = self._walk()
        for path, state in states.items():
            if path in found:
                if is_state_of(found[path].generator, state):
                    set_state(found[path].generator, state)
            elif path in empty:
                _put(*empty[path], made_from(state))

    @contextmanager
    def kept(self) -> Generator[None]:
        """Restore the generators after the block, and remove those that were made in it."""
        found, empty = self._walk()
        states = [(held.generator, state_of(held.generator)) for held in found.values()]
        try:
            yield
        finally:
            for generator, state in states:
                set_state(generator, state)
            for holder, key in empty.values():
                value = _at(holder, key)
                if is_generator(value) and not is_global(value):
                    _put(holder, key, None)

    def _walk(self) -> tuple[dict[str, Held], dict[str, tuple[Any, Any]]]:
        """Return the generators, and the attributes that are `None`, by path."""
        found: dict[str, Held] = {}
        empty: dict[str, tuple[Any, Any]] = {}
        seen: dict[int, Any] = {}  # the objects too, so that no other one gets the address of one that ends
        near, far = deque[_Place](), deque[_Place]()  # far: containers in containers, which most often hold data
        near.extend(_Place("", "{}", None, name, root) for name, root in self._roots.items())
        while (near or far) and len(seen) < _MOST_OBJECTS:
            place = (near or far).popleft()
            value = place.value
            if value is None:
                empty[place.path] = place.holder, place.key
                continue
            if id(value) in seen or _is_left_out(type(value)):
                continue
            seen[id(value)] = value
            if not is_generator(value):
                for part in _places_in(value, place.path):
                    (far if part.is_nested_container else near).append(part)
            elif not is_global(value):
                found[place.path] = Held(place.holder, place.key, value)
        return found, empty


def generators_of_dataset(dataset: Any) -> list[Any]:
    """Return the random generators that a dataset, its transforms and the datasets inside it hold.

    Example:
        >>> from torch.utils.data import ConcatDataset, TensorDataset
        >>> parts = [TensorDataset(torch.zeros(2)), TensorDataset(torch.ones(2))]
        >>> parts[1].rng = np.random.default_rng(0)
        >>> generators_of_dataset(ConcatDataset(parts)) == [parts[1].rng]
        True
    """
    return HeldGenerators({"dataset": dataset}).generators()


def _places_in(value: Any, path: str) -> Iterator[_Place]:
    """Yield the parts of an object that may be or hold generators."""
    for step, key, part in _parts(value):
        if type(part) is np.ndarray and part.dtype == object:
            part = list(islice(part.flat, _LONGEST + 1))
        if type(part) not in _DATA:
            yield _Place(path, step, value, key, part)


def _parts(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of an object: how its path continues, its attribute or entry, and the part.

    No code of the object's class is called: it may be a proxy, or have other effects.
    """
    kind = type(value)
    if issubclass(kind, dict):
        if dict.__len__(value) <= _LONGEST:
            yield from (("[{!r}]", key, part) for key, part in list(dict.items(value)))
        return
    for sequence in _SEQUENCES:
        if issubclass(kind, sequence):
            # Long ones are read for datasets alone, such as those of ConcatDataset.
            if sequence.__len__(value) <= _LONGEST or issubclass(type(next(sequence.__iter__(value))), Dataset):
                yield from (("[{}]", index, part) for index, part in enumerate(list(sequence.__iter__(value))))
            return
    if issubclass(kind, functools.partial):
        named: Iterable[tuple[str, Any]] = ((name, getattr(value, name)) for name in ("func", "args", "keywords"))
    elif issubclass(kind, (types.MethodType, types.BuiltinMethodType)):
        named = [("__self__", value.__self__)]
    elif issubclass(kind, types.FunctionType):
        named = _used_by(value)
    else:
        used = (part for function in _methods(kind) for part in _globals(function))
        named = chain({**_of_class(kind), **_vars(value)}.items(), used)
    yield from ((".{}", name, part) for name, part in named)


def _vars(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for slot in _slots(type(value)):
        with suppress(AttributeError):  # not set
            attributes[slot.__name__] = slot.__get__(value)
    with suppress(AttributeError):
        attributes |= object.__getattribute__(value, "__dict__")
    if issubclass(type(value), nn.Module):
        for name in _PARTS_OF_MODULES:
            attributes.pop(name, None)
    return attributes


@_remembered
def _is_left_out(kind: type) -> bool:
    """Whether objects of a class hold data, or what reads it and trains with it."""
    return issubclass(kind, _PLAIN) or any(part.__module__ in _ENGINES for part in kind.__mro__)


@_remembered
def _slots(kind: type) -> list[Any]:
    members = [vars(part).get(name) for part in kind.__mro__ for name in vars(part).get("__slots__", ())]
    return [member for member in members if isinstance(member, types.MemberDescriptorType)]


@_remembered
def _of_class(kind: type) -> dict[str, Any]:
    """Return the generators that are attributes of a class."""
    found: dict[str, Any] = {}
    for part in reversed(kind.__mro__):
        found |= {name: value for name, value in vars(part).items() if is_generator(value)}
    return found


@_remembered
def _methods(kind: type) -> list[types.FunctionType]:
    members = [member for part in kind.__mro__ for member in vars(part).values()]
    return [member for member in members if isinstance(member, types.FunctionType) and not _is_of_library(member)]


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of a function, and the variables outside that it uses."""
    yield from zip(("__defaults__", "__kwdefaults__"), (function.__defaults__, function.__kwdefaults__), strict=True)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    if not _is_of_library(function):
        yield from _globals(function)


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables of a function that are generators, or what it may call: transforms and functions."""
    defined = function.__globals__
    for name in sorted(names_in(function.__code__) & defined.keys()):
        value = defined[name]
        kind = type(value)
        if is_generator(value) or (callable(value) and not issubclass(kind, type)):
            yield name, value


@functools.cache
def _libraries() -> tuple[str, ...]:
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return tuple(folder + os.sep for folder in {*installed, str(Path(__file__).parents[2])})  # this library too


def _is_of_library(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_libraries())


def _at(holder: Any, key: Any) -> Any:
    """Return what an attribute or an entry holds, and `None` if it has been removed."""
    with suppress(LookupError):
        for kind in (dict, list, deque):
            if issubclass(type(holder), kind):
                return kind.__getitem__(holder, key)
    return _vars(holder).get(key)


def _put(holder: Any, key: Any, value: Any) -> None:
    """Set an attribute or an entry, where that is possible."""
    with suppress(AttributeError, TypeError):
        if isinstance(holder, (dict, list, deque)):
            holder[key] = value
        else:
            setattr(holder, key, value)
