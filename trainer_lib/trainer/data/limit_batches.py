"""Limits on the batches per epoch, applied before a loader is prepared, so that it knows the last batch."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer_lib.data_loader.order.epoch_order import iterates_as
from trainer_lib.data_loader.order.epoch_start import started
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.data_loader.readers.reader import copied
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.train_samplers import LimitedSampler, first_samples

# Hides the inner dataset's own position in the data: the limited one is resumed by reading up to it.
_NOT_FORWARDED = frozenset({"dataset", "state_dict", "load_state_dict", "_ex_iterable"})


class LimitedIterable(IterableDataset[Any]):
    """The first `rounds` rounds of an iterable dataset in each epoch.

    Args:
        dataset: The dataset.
        rounds: Rounds, at most; several workers divide them among themselves.
        round_size: Samples in a round.

    Example:
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(9))
        >>> list(LimitedIterable(Numbers(), rounds=2, round_size=2))
        [0, 1, 2, 3]
    """

    def __init__(self, dataset: Any, rounds: int, round_size: int) -> None:
        self.dataset = dataset
        self._rounds, self._round_size = rounds, round_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rounds = self._rounds if worker is None else len(range(worker.id, self._rounds, worker.num_workers))
        return islice(started(iter(self.dataset)), rounds * self._round_size)

    def __len__(self) -> int:
        return min(len(self.dataset), self._rounds * self._round_size)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the dataset."""
        if name in _NOT_FORWARDED or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def limited_dataset(dataset: Any, batches: int, batch_size: int, num_processes: int) -> LimitedIterable:
    """Return an iterable dataset of which each rank reads at most `batches` batches per epoch."""
    return LimitedIterable(dataset, batches, batch_size * (1 if is_split_already(dataset) else num_processes))


def limited_loader(loader: DataLoader[Any], batches: int, num_processes: int) -> DataLoader[Any]:
    """Return a copy of a loader from which each rank reads at most `batches` batches per epoch.

    Args:
        loader: A user's loader, which stays unchanged.
        batches: Batches per epoch.
        num_processes: The world size.

    Example:
        >>> [batch.tolist() for batch in limited_loader(DataLoader(range(9), batch_size=2), 2, num_processes=1)]
        [[0, 1], [2, 3]]
    """
    if isinstance(loader, PreparedLoader):
        raise ConfigurationError(
            f"A prepared loader cannot be limited to {batches} batches. Give the loader before preparing it."
        )
    limited = copied(loader)
    if isinstance(loader.dataset, IterableDataset):
        size = 1 if loader.batch_sampler is None else loader.batch_size or 1
        limited.__dict__["dataset"] = limited_dataset(loader.dataset, batches, size, num_processes)
        return limited
    # torch forbids setattr of samplers, so this writes to __dict__.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source: Any = getattr(loader, name)
    if iterates_as(source, "BatchSampler"):
        source = copy.copy(source)
        source.sampler = first_samples(source.sampler, batches * source.batch_size * num_processes)
        limited.__dict__["sampler"] = source.sampler
    else:
        source = LimitedSampler(source, batches * num_processes)
    limited.__dict__[name] = source
    return limited
