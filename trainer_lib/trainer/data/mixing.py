"""Datasets mixed by weights: which sample of which dataset comes where is computed, so a run resumes exactly."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer_lib.data_loader.order.permutation import Shuffle
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.datasets import as_dataset, length_of


class MixedDataset(Dataset[Any]):
    """Several map-style datasets as one, of which an epoch reads each in proportion to its weight.

    An epoch has `length` samples, spread evenly over the datasets: the shares are exact up to one sample. Each dataset
    is read in a random order that covers all of its samples before any comes again, and the next epoch continues where
    the last one ended. What comes where is a function of seed, epoch and index: it is the same on all processes, and
    after a resume.

    Args:
        datasets: The datasets: map-style, or arrays as `Trainer(train_dataset=…)` takes them.
        weights: How many samples of each, relative to the others; by default as many as each has.
        length: The samples of an epoch; by default as many as all datasets have together.
        seed: The seed of the orders.

    Example:
        >>> mixed = MixedDataset([["a"] * 2, ["b"] * 6], weights=[3, 1])
        >>> [mixed[index] for index in range(len(mixed))], mixed.counts
        (['b', 'a', 'a', 'a', 'b', 'a', 'a', 'a'], [6, 2])
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(datasets, (list, tuple)) or not datasets:
            raise ConfigurationError("MixedDataset(datasets=…) takes a list of one or more datasets.")
        self.datasets = [as_dataset(data, f"datasets[{index}]") for index, data in enumerate(datasets)]
        lengths = [length_of(data) for data in self.datasets]
        if None in lengths:
            kind = type(self.datasets[lengths.index(None)]).__name__
            raise ConfigurationError(
                f"datasets[{lengths.index(None)}] is a {kind}, which has no length. MixedDataset takes map-style "
                "datasets only."
            )
        self._lengths = [size or 0 for size in lengths]
        if length is not None:
            check_count("length", length)
        check_count("seed", seed, at_least=0)
        self.seed = seed
        self.weights = _checked(weights, len(self.datasets)) or [float(size) for size in self._lengths]
        self.counts = _shares(self.weights, sum(self._lengths) if length is None else length)
        # In memory that workers share, so that those that live through several epochs know of the next one too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Read as in this epoch; a prepared loader calls it at the start of each."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return sum(self.counts)

    def place(self, index: int) -> tuple[int, int]:
        """Return where the sample of an index comes from in this epoch: which dataset, and which of its samples.

        Example:
            >>> mixed = MixedDataset([["a", "b"], ["c"]])
            >>> mixed.place(0), mixed[0]
            ((1, 0), 'c')
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} of {len(self)}.")
        which, nth = self._spread(index % len(self))
        size = self._lengths[which]
        passes, at = divmod(int(self._epoch) * self.counts[which] + nth, size)
        order = _order(size, f"mixed {self.seed} {which} {passes}")
        return which, int(order(np.array([at]))[0])

    def __getitem__(self, index: int) -> Any:
        which, at = self.place(index)
        return self.datasets[which][at]

    def _spread(self, index: int) -> tuple[int, int]:
        """Return which dataset an index belongs to, and how many of that dataset come before it."""
        rest = len(self)
        for which, count in enumerate(self.counts):
            before = index * count // rest
            if (index + 1) * count // rest > before:
                return which, before
            index, rest = index - before, rest - count
        raise AssertionError  # the last dataset with samples takes all that is left


@lru_cache(maxsize=64)
def _order(size: int, key: str) -> Shuffle:
    return Shuffle(size, key)


def _checked(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [] if weights is None else [float(weight) for weight in weights]
    if weights is not None and len(given) != count:
        raise ConfigurationError(f"weights has {len(given)} values for {count} datasets. Give one for each.")
    for index, weight in enumerate(given):
        if not 0 < weight < math.inf:
            raise ConfigurationError(
                f"weights[{index}] must be a finite number above 0 (got {weight:g}). Leave out a dataset that is not "
                "to be read."
            )
    return given


def _shares(weights: Sequence[float], length: int) -> list[int]:
    """Return how many of `length` samples each dataset gives: rounded so that they add up."""
    exact = [weight / sum(weights) * length for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda which: shares[which] - exact[which])
    for which in by_rest[: length - sum(shares)]:
        shares[which] += 1
    return shares
