"""Samplers: shuffles that are functions of seed and epoch, and a batch sampler that skips batches."""

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from trainer_lib.data_loader.order.permutation import Draws, Positions, Shuffle

_CHUNK = 4096  # positions computed at once: the overhead of a numpy call is small beside it, and so is the memory


class SeedableRandomSampler(RandomSampler):
    """Torch's random order, drawn from a generator that is seeded with seed + epoch: the same on all ranks.

    It is the order of Accelerate's sampler of this name, and of Hugging Face's Trainer.

    Args:
        data_source: The dataset.
        replacement: Draw with replacement.
        num_samples: How many samples an epoch has; by default as many as the dataset.
        generator: Accepted for compatibility: the order is a function of seed and epoch.
        data_seed: The seed; by default torch's.

    Example:
        >>> sampler = SeedableRandomSampler(range(6), data_seed=7)
        >>> list(sampler) == torch.randperm(6, generator=torch.Generator().manual_seed(7)).tolist()
        True
        >>> list(sampler) == torch.randperm(6, generator=torch.Generator().manual_seed(8)).tolist()  # the next epoch
        True
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed: int = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @classmethod
    def like(cls, sampler: Any) -> Self:
        """Return a sampler over the same samples as torch's (or torchdata's) random sampler."""
        seed = getattr(sampler, "initial_seed", None)
        seedable = cls(sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, seed)
        # Attributes that a subclass adds.
        seedable.__dict__ = {**sampler.__dict__, **seedable.__dict__}
        return seedable

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """Yield the samples of this epoch from `position` on."""
        epoch, end = self.epoch, self.num_samples
        sample_at = self.lookup(self.initial_seed, epoch)
        for start in range(position, end, _CHUNK):
            yield from sample_at(np.arange(start, min(start + _CHUNK, end))).tolist()
        if self.epoch == epoch:  # set_epoch was not called in the meantime
            self.epoch: int = epoch + 1

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions of an epoch to its samples."""
        generator = torch.Generator().manual_seed(seed + epoch)
        samples = RandomSampler(self.data_source, self.replacement, self._num_samples, generator)
        return np.fromiter(samples, np.int64, self.num_samples).__getitem__


class LowMemoryRandomSampler(SeedableRandomSampler):
    """A random order that is computed instead of listed: it takes no memory, and can start at any position.

    The sample at a position is a function of seed, epoch and position. For datasets whose permutation does not fit into
    memory (`low_memory_shuffle=True`).

    Example:
        >>> sampler = LowMemoryRandomSampler(range(10**12), data_seed=7)
        >>> next(sampler.iterate_from(10**11)) < 10**12
        True
    """

    def lookup(self, seed: int, epoch: int) -> Callable[[Positions], Positions]:
        """Return the function from positions of an epoch to its samples."""
        size, key = len(self.data_source), f"{seed}:{epoch}"
        if self.replacement:
            return Draws(size, key)
        if self.num_samples <= size:
            return Shuffle(size, key)
        return _RepeatedShuffle(size, key)


class SkipBatchSampler(BatchSampler):
    """The batches of another batch sampler, without the first ones.

    Args:
        batch_sampler: The other batch sampler.
        skip_batches: How many batches to skip.
        every_pass: Skip them in each pass, not only in the first.

    Example:
        >>> list(SkipBatchSampler([[0, 1], [2, 3], [4]], skip_batches=2))
        [[4]]
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0, every_pass: bool = True) -> None:
        # Not super().__init__: sampler, batch size and drop_last are those of the other batch sampler.
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self._every_pass = every_pass

    def __iter__(self) -> Iterator[Any]:
        # A generator, since torch makes two iterators for a pass with workers and reads only one of them.
        skipped = self.skip_batches
        if not self._every_pass:
            self.skip_batches: int = 0
        yield from islice(self.batch_sampler, skipped, None)

    @property
    def total_length(self) -> int:
        """The number of batches including the skipped ones."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other batch sampler."""
        if name == "batch_sampler":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class _RepeatedShuffle:
    """All samples in one random order, then all in another, for more draws than there are samples."""

    def __init__(self, size: int, key: str) -> None:
        self._size, self._key = size, key

    def __call__(self, positions: Positions) -> Positions:
        rounds = positions // self._size
        samples = np.empty_like(positions)
        for number in np.unique(rounds).tolist():
            chosen = rounds == number
            samples[chosen] = Shuffle(self._size, f"{self._key}:{number}")(positions[chosen] - number * self._size)
        return samples
