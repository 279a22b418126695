"""Samplers of training data: by length, by weight, and the first samples of another sampler.

The order of a `SeedableRandomSampler` is a function of seed and epoch: it is the same on all ranks and after a resume.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler, SequentialSampler

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.data_loader.order.epoch_order import iterates_as
from trainer_lib.data_loader.order.epoch_start import started
from trainer_lib.data_loader.order.permutation import Draws, Positions, Shuffle
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

_GROUP = 1024
_BITS = 1 << 32


class LengthGroupedSampler(SeedableRandomSampler):
    """A random order with samples of similar length next to each other, so that batches need little padding.

    Samples are shuffled, and each group of them is sorted by length; the longest of all comes first, so that a batch
    that does not fit into memory fails at once. The order does not depend on the batch size, so a run can resume with
    another batch size.

    Args:
        lengths: The length of each sample.
        group_size: Samples sorted together; by default 1024, at most a quarter of all.
        seed: The seed of the order; by default torch's seed.

    Example:
        >>> lengths = [3, 9, 4, 1, 5, 9, 2, 6]
        >>> [lengths[index] for index in LengthGroupedSampler(lengths, group_size=8)]
        [9, 9, 6, 5, 4, 3, 2, 1]
    """

    def __init__(self, lengths: Sequence[int], group_size: int | None = None, seed: int | None = None) -> None:
        values = np.asarray(lengths)
        is_numeric = values.ndim == 1 and values.dtype.kind in "iuf"
        if not is_numeric or not np.isfinite(values).all() or (values != np.floor(values)).any():
            raise ConfigurationError("The lengths of samples must be whole numbers, one per sample.")
        self.lengths: np.ndarray[Any, Any] = values.astype(np.int64)
        super().__init__(range(len(self.lengths)), data_seed=seed)
        self.group_size: int = group_size or min(_GROUP, max(1, len(self.lengths) // 4))

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions in an epoch to samples."""
        size = len(self.lengths)
        shuffled = Shuffle(size, f"{seed}:{epoch}")(np.arange(size))
        order = shuffled[np.lexsort((-self.lengths[shuffled], np.arange(size) // self.group_size))]
        # Each group starts with its longest sample; the longest of all swaps places with the first.
        starts = np.arange(0, size, self.group_size)
        longest = starts[np.argmax(self.lengths[order[starts]])]
        order[[0, longest]] = order[[longest, 0]]
        return order.__getitem__


class WeightedSampler(SeedableRandomSampler):
    """Samples drawn with replacement, with probabilities in proportion to their weights.

    Args:
        weights: The weight of each sample; they need not add up to 1.
        num_samples: Samples in an epoch; by default one per weight.
        seed: The seed of the order; by default torch's seed.

    Example:
        >>> list(WeightedSampler([0.0, 0.5, 0.0], num_samples=4))
        [1, 1, 1, 1]
    """

    def __init__(self, weights: Sequence[float], num_samples: int | None = None, seed: int | None = None) -> None:
        self.weights: npt.NDArray[np.float64] = np.asarray(weights, dtype=np.float64)
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ConfigurationError("sample_weights must be finite numbers of at least 0, one per sample.")
        if not self.weights.any():
            raise ConfigurationError("sample_weights must not all be 0: no sample could be drawn.")
        super().__init__(range(len(self.weights)), True, num_samples, data_seed=seed)
        self._bounds = np.cumsum(self.weights)
        self._last = int(np.flatnonzero(self.weights)[-1])

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions in an epoch to samples."""
        # Two draws of 32 bits: a single one is too coarse for hundreds of millions of samples.
        high, low = (Draws(_BITS, f"{seed}:{epoch}:{half}") for half in ("high", "low"))

        def samples_at(positions: Positions) -> Positions:
            drawn = (high(positions) + low(positions) / _BITS) / _BITS * self._bounds[-1]
            return np.minimum(np.searchsorted(self._bounds, drawn, side="right"), self._last).astype(np.int64)

        return samples_at


class LimitedSampler(Sampler[Any]):
    """The first samples of another sampler, or the first batches of a batch sampler.

    Args:
        source: The other sampler.
        count: Samples or batches, at most.

    Example:
        >>> list(LimitedSampler([[0, 1], [2, 3], [4]], 2))
        [[0, 1], [2, 3]]
    """

    def __init__(self, source: Iterable[Any], count: int) -> None:
        self.source = source
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(started(iter(self.source)), self.count)

    def __len__(self) -> int:
        return min(len(self.source), self.count)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the other sampler."""
        if name == "source":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.source, name)


def first_samples(sampler: Any, count: int) -> Any:
    """Return a sampler of the first `count` samples of each epoch; of a random sampler they differ between epochs.

    Example:
        >>> list(first_samples(SequentialSampler(range(9)), 3))
        [0, 1, 2]
    """
    if iterates_as(sampler, "SequentialSampler"):
        return SequentialSampler(range(min(count, len(sampler))))
    if not isinstance(sampler, SeedableRandomSampler) and not iterates_as(sampler, "RandomSampler"):
        is_short = hasattr(sampler, "__len__") and len(sampler) <= count
        return sampler if is_short else LimitedSampler(sampler, count)
    limited = copy.copy(sampler)
    # RandomSampler takes it in its constructor only.
    limited._num_samples = min(count, len(sampler))  # pyright: ignore[reportPrivateUsage]
    return limited


def lengths_of(dataset: Any, column: str, option: str = "train_dataset") -> list[int]:
    """Return the lengths of a dataset's samples, from a field of theirs or from their `input_ids`.

    Args:
        dataset: A map-style dataset of samples with named fields.
        column: The field that holds the length.
        option: The name of the dataset in errors.

    Raises:
        ConfigurationError: If the samples have neither field.

    Example:
        >>> lengths_of([{"input_ids": [1, 2]}, {"input_ids": [3]}], "length")
        [2, 1]
    """
    with RandomStream(0):  # keeps training's random generators unchanged
        first = dataset[0]
        if not isinstance(first, Mapping) or not {column, "input_ids"} & set(first):
            names = list(first) if isinstance(first, Mapping) else []
            raise ConfigurationError(
                f"group_by_length needs the lengths of samples, and those of {option} have no field {column!r} and no "
                f"'input_ids'. Their fields: {', '.join(map(str, names)) or 'none'}.{did_you_mean(column, names)} "
                "Give length_column."
            )
        name = column if column in first else "input_ids"
        values = (value for (value,) in fields_of(dataset, [name]))
        return [int(value) for value in values] if name == column else [len(value) for value in values]


def fields_of(dataset: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield fields of each sample. A stored column is read as a whole: reading each sample could take long.

    Example:
        >>> list(fields_of([{"input_ids": [1, 2], "labels": 0}], ["input_ids", "labels"]))
        [([1, 2], 0)]
    """
    if {*names} <= {*(getattr(dataset, "column_names", None) or ())}:
        yield from zip(*(dataset[name] for name in names), strict=True)
        return
    for index in range(len(dataset)):
        sample = dataset[index]
        yield tuple(sample[name] for name in names)
