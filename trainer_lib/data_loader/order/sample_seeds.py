"""Random augmentations that depend only on seed, epoch and sample."""

import operator
import random
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from trainer_lib.data_loader.order.data_rng import RandomStream, derived_seed
from trainer_lib.data_loader.order.epoch_start import reseed

_64_BITS = (1 << 64) - 1


class SeededSamples:
    """A map-style dataset that seeds the generators before each sample: the global ones and those that it holds.

    Its keys are those of `SeededKeys`: they carry the seed of the pass, also to workers that persist over several
    passes. Reading or setting an attribute reads or sets it on the dataset inside.
    """

    dataset: Any

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._held: list[Any] | None = None
        # In a worker only samples draw from the generators; in the main process training does.
        self._stream = RandomStream(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        """Return a sample (or what the dataset returns for a list of indices)."""
        if get_worker_info() is not None:
            return self._sample(key)
        with self._stream:
            return self._sample(key)

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        """Return several samples, one by one: what a sample draws must not depend on its batch."""
        if get_worker_info() is not None:
            return [self._sample(key) for key in keys]
        with self._stream:
            return [self._sample(key) for key in keys]

    def _sample(self, key: Any) -> Any:
        seed, index = key
        mixed = _mixed(seed, index)
        _seed_generators(mixed)
        if self._held is None:
            from trainer_lib.data_loader.order.held_generators import generators_of_dataset

            self._held = generators_of_dataset(self.dataset)
        for number, generator in enumerate(self._held, 1):
            reseed(generator, (mixed + number) & _64_BITS)
        fetch: Any = getattr(self.dataset, "__getitems__", None)
        # As torch fetches it: some datasets read several samples faster.
        return self.dataset[index] if fetch is None or isinstance(index, list) else fetch([index])[0]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker gets, which finds the generators of its own global variables."""
        return {**vars(self), "_held": None}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset inside."""
        if name == "dataset" or name.startswith("__"):  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the dataset, unless it is one of this class."""
        if name in ("dataset", "_held", "_stream"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class SeededKeys:
    """A sampler (or batch sampler) whose indices carry the seed of the pass, for `SeededSamples`."""

    def __init__(self, source: Any, by_batches: bool) -> None:
        self.source = source
        self.by_batches = by_batches
        self.seed = 0

    def enter(self, seed: int, epoch: int) -> None:
        """Set the pass."""
        self.seed: int = derived_seed(seed, epoch, "samples")

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return _keyed(self.source, self.seed, self.by_batches)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler inside."""
        if name == "source":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.source, name)


def _keyed(source: Iterable[Any], seed: int, by_batches: bool) -> Iterator[Any]:
    for unit in source:
        yield [(seed, index) for index in unit] if by_batches else (seed, unit)


def _mixed(seed: int, index: Any) -> int:
    """Return a well-mixed number of 64 bits for a sample of a pass."""
    try:
        index = operator.index(index)
    except TypeError:  # a name, or a list of indices
        return int.from_bytes(blake2b(f"{seed}:{index!r}".encode(), digest_size=8).digest(), "little")
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return mixed ^ (mixed >> 31)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which also seeds accelerators and takes 100 times as long.
    torch.default_generator.manual_seed(seed)
