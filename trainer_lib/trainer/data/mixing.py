"""Datasets mixed by weights, in an order computed from seed and epoch, so that a run resumes exactly."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer_lib.data_loader.order.permutation import Shuffle
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.datasets import as_dataset


class MixedDataset(Dataset[Any]):
    """Several map-style datasets as one; an epoch reads samples of each in proportion to its weight.

    An epoch has `length` samples, spread evenly over the datasets: the proportions are exact up to one sample. Each
    dataset is read in a random order that covers all of its samples before any repeats, and the next epoch continues
    where the last one ended. The order is a function of seed, epoch and index: it is the same on all ranks and after a
    resume.

    Args:
        datasets: The datasets: map-style, or arrays as `Trainer(train_dataset=…)` takes them.
        weights: The proportion of samples from each dataset; by default its length.
        length: Samples in an epoch; by default the sum of the datasets' lengths.
        seed: The seed of the order.

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
            raise ConfigurationError("MixedDataset: datasets must be a list of one or more datasets.")
        self.datasets: list[Any] = [as_dataset(data, f"datasets[{index}]") for index, data in enumerate(datasets)]
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
        self.weights: list[float] = _checked_weights(weights, len(self.datasets)) or [
            float(size) for size in self._lengths
        ]
        self.counts: list[int] = _shares(self.weights, sum(self._lengths) if length is None else length)
        # In memory shared with the workers, so that persistent workers see the next epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to read; a prepared loader calls this at the start of each epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return sum(self.counts)

    def place(self, index: int) -> tuple[int, int]:
        """Return the dataset, and the sample in it, that an index of this epoch stands for.

        Example:
            >>> mixed = MixedDataset([["a", "b"], ["c"]])
            >>> mixed.place(0), mixed[0]
            ((1, 0), 'c')
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} is out of range: there are {len(self)} samples.")
        dataset, nth = self._spread(index % len(self))
        size = self._lengths[dataset]
        passes, position = divmod(int(self._epoch) * self.counts[dataset] + nth, size)
        order = _order(size, f"mixed {self.seed} {dataset} {passes}")
        return dataset, int(order(np.array([position]))[0])

    def __getitem__(self, index: int) -> Any:
        dataset, sample = self.place(index)
        return self.datasets[dataset][sample]

    def _spread(self, index: int) -> tuple[int, int]:
        """Return the dataset of an index, and how many samples of that dataset come before it."""
        rest = len(self)
        for dataset, count in enumerate(self.counts):
            before = index * count // rest
            if (index + 1) * count // rest > before:
                return dataset, before
            index, rest = index - before, rest - count
        raise AssertionError  # the last dataset with samples takes all that remain


@lru_cache(maxsize=64)
def _order(size: int, key: str) -> Shuffle:
    return Shuffle(size, key)


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    values = [] if weights is None else [float(weight) for weight in weights]
    if weights is not None and len(values) != count:
        raise ConfigurationError(f"weights must have one value per dataset (got {len(values)} for {count} datasets).")
    for index, weight in enumerate(values):
        if not 0 < weight < math.inf:
            raise ConfigurationError(
                f"weights[{index}] must be a finite number above 0 (got {weight:g}). To skip a dataset, leave it out."
            )
    return values


def _shares(weights: Sequence[float], length: int) -> list[int]:
    """Return how many of `length` samples come from each dataset, rounded so that they add up."""
    exact = [weight / sum(weights) * length for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda dataset: shares[dataset] - exact[dataset])
    for dataset in by_rest[: length - sum(shares)]:
        shares[dataset] += 1
    return shares
