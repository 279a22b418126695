"""An error for data that differs between ranks, which names the ranks and a differing sample."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.collectives.agreement import check_same_on_all_ranks
from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.data_loader.readers.fingerprint import Fingerprint, alike, fingerprint, shown
from trainer_lib.data_loader.readers.probe import samples_at, samples_of_stream
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.foundation.lengths import length_of
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup

_logger = get_logger(__name__)

_COUNT = 2  # samples to compare
_SHOWN = 8  # of the order
_END = object()

Reading = list[Fingerprint] | None  # the samples of one rank; None: they cannot be read outside of training


def check_training_data(group: ProcessGroup, dataset: Any, prepared: PreparedLoader) -> None:
    """Check that all ranks read the same training data in the same order, which is then divided between them.

    Compares the order of a map-style dataset and its first two samples; `checked_stream` checks iterable datasets.

    Raises:
        DistributedOperationException: If the order or the samples differ; on all ranks.
    """
    keys = prepared.first_samples()
    check_same_on_all_ranks(group, {"the samples that an epoch begins with": keys and keys[:_SHOWN]})
    if not isinstance(prepared, DataLoaderDispatcher) and not isinstance(dataset, IterableDataset):
        _check(group, dataset, None if keys is None else keys[:_COUNT], "train_dataset")


def check_evaluation_data(group: ProcessGroup, loader: DataLoader[Any], option: str) -> None:
    """Check that all ranks read the same map-style evaluation set, by its first and last sample."""
    if not isinstance(loader.dataset, IterableDataset):
        length = length_of(loader.dataset)
        _check(group, loader.dataset, [0, length - 1] if length else None, option)


def checked_stream(group: ProcessGroup, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of an epoch, after all ranks have compared the first samples of an iterable dataset.

    Raises:
        DistributedOperationException: If the stream differs on a rank; on all ranks.
    """
    loader.compares_openings = False  # the loader only warns
    first = next(batches, _END)
    digests: list[int | None] = group.all_gather_objects(loader.opening_digest)
    if None not in digests and len(set(digests)) > 1:
        _explain_streams(group, loader.dataset, digests)
    return batches if first is _END else chain((first,), batches)


def _check(group: ProcessGroup, dataset: Any, keys: Sequence[Any] | None, option: str) -> None:
    def read() -> Reading:
        return None if keys is None or is_split_already(dataset) else _fingerprints(samples_at(dataset, keys))

    reading = read()
    readings: list[Reading] = group.all_gather_objects(reading)
    different = _different(readings)
    if different and _is_repeatable(group, reading, read):
        raise DistributedOperationException(
            f"{_difference(readings, different, option, keys or [])} All ranks must read the same data, which is "
            "divided between them. If it is random, seed it first: torch.manual_seed(0); else load the same files on "
            "all ranks."
        )


def _explain_streams(group: ProcessGroup, dataset: Any, digests: Sequence[int | None]) -> None:
    """Raise if the ranks read different samples each time; warn if that is not known."""

    def read() -> Reading:
        return _fingerprints(samples_of_stream(dataset, _COUNT))

    reading = read()
    readings: list[Reading] = group.all_gather_objects(reading)
    different = _different(readings)
    ranks = different or [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    error = (
        f"{_difference(readings, ranks, 'train_dataset', range(_COUNT))} All ranks must read the same samples, of "
        "which each keeps its part. If the dataset already yields different samples on each rank, set its attribute "
        "is_split_between_processes = True. If its samples are random, seed them."
    )
    if different and _is_repeatable(group, reading, read):
        raise DistributedOperationException(error)
    _logger.warning("%s", error)


def _fingerprints(samples: list[Any] | None) -> Reading:
    return None if samples is None else [fingerprint(sample) for sample in samples]


def _different(readings: Sequence[Reading]) -> list[int]:
    """Return the ranks that read other samples than rank 0; none if a rank could not read any."""
    if None in readings:
        return []
    return [rank for rank, reading in enumerate(readings) if not _all_alike(readings[0], reading)]


def _is_repeatable(group: ProcessGroup, reading: Reading, read: Callable[[], Reading]) -> bool:
    """Whether all ranks read the same samples a second time: if not, a clock or unseeded randomness changes them."""
    return all(group.all_gather_objects(_all_alike(reading, read())))


def _all_alike(first: Reading, other: Reading) -> bool:
    if first is None or other is None or len(first) != len(other):
        return False
    return all(alike(a, b) for a, b in zip(first, other, strict=True))


def _difference(readings: Sequence[Reading], different: Sequence[int], option: str, keys: Sequence[Any]) -> str:
    """Return the ranks that differ, and a sample that differs on one of them."""
    *first, last = different
    ranks = f"Ranks {', '.join(map(str, first))} and {last} read" if first else f"Rank {last} reads"
    text = f"{ranks} other data than rank 0."
    for key, ours, theirs in zip(keys, readings[0] or [], readings[different[0]] or [], strict=False):
        if not alike(ours, theirs):
            text += f" {option}[{key!r}] is {shown(ours)} on rank 0, and {shown(theirs)} on rank {different[0]}."
            break
    return text
