"""Training data that differs between processes is an error, which names the processes that differ."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.data_loader.readers.fingerprint import Fingerprint, alike, fingerprint, shown
from trainer_lib.data_loader.readers.probe import samples_at, samples_of_stream
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.trainer.data.datasets import length_of

_logger = get_logger(__name__)

_COUNT = 2  # samples that are compared
_END = object()

Reading = list[Fingerprint] | None  # of one process; None: it cannot be read apart from training


def check_training_data(group: ProcessGroup, dataset: Any, prepared: PreparedLoader) -> None:
    """Check that all processes read the same training data, of which each takes its part.

    Of a map-style dataset, the first two samples of the order are compared; of a stream `compared_opening` compares
    what training itself reads.

    Raises:
        DistributedOperationException: If they do not; on all processes.
    """
    if group.size > 1 and not isinstance(prepared, DataLoaderDispatcher) and not isinstance(dataset, IterableDataset):
        keys = prepared.first_samples()
        _check(group, dataset, None if keys is None else keys[:_COUNT], "train_dataset")


def check_evaluation_data(group: ProcessGroup, loader: DataLoader[Any], option: str) -> None:
    """Check the same of a map-style set to evaluate on, by its first and its last sample."""
    if group.size > 1 and not isinstance(loader.dataset, IterableDataset):
        length = length_of(loader.dataset)
        _check(group, loader.dataset, [0, length - 1] if length else None, option)


def compared_opening(group: ProcessGroup, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass, after all processes have compared what a stream began with.

    Raises:
        DistributedOperationException: If the stream is another one on some process; on all processes.
    """
    if group.size == 1 or not loader.reads_alike:
        return batches
    first = next(batches, _END)
    told: list[int | None] = group.all_gather_objects(loader.opening_digest)
    if None not in told and len(set(told)) > 1:
        _explain_streams(group, loader.dataset)
    return batches if first is _END else chain((first,), batches)


def _check(group: ProcessGroup, dataset: Any, keys: Sequence[Any] | None, option: str) -> None:
    def read() -> Reading:
        return None if keys is None or is_split_already(dataset) else _fingerprints(samples_at(dataset, keys))

    here = read()
    readings: list[Reading] = group.all_gather_objects(here)
    different = _different(readings)
    if different and _is_repeatable(group, here, read):
        raise DistributedOperationException(
            f"{_difference(readings, different, option, keys or [])} All processes have to read the same data, which "
            "is divided between them. If it is drawn at random, seed that first: torch.manual_seed(0); else load the "
            "same files on all processes."
        )


def _explain_streams(group: ProcessGroup, dataset: Any) -> None:
    def read() -> Reading:
        return _fingerprints(samples_of_stream(dataset, _COUNT))

    here = read()
    readings: list[Reading] = group.all_gather_objects(here)
    if different := _different(readings):
        error = (
            f"{_difference(readings, different, 'train_dataset', range(_COUNT))} All processes have to read the same "
            "samples, of which each keeps its part. If the dataset gives each process its own part already, say so: "
            "is_split_between_processes = True, as an attribute of it. If it draws them at random, seed that."
        )
        if _is_repeatable(group, here, read):
            raise DistributedOperationException(error)
        _logger.warning("%s", error)


def _fingerprints(samples: list[Any] | None) -> Reading:
    return None if samples is None else [fingerprint(sample) for sample in samples]


def _different(readings: Sequence[Reading]) -> list[int]:
    """Return the processes that read something else than process 0; none where that cannot be known."""
    if None in readings:
        return []
    return [rank for rank, reading in enumerate(readings) if not _all_alike(readings[0], reading)]


def _is_repeatable(group: ProcessGroup, here: Reading, read: Callable[[], Reading]) -> bool:
    """Whether all processes read the same a second time: else samples differ by a clock, or by entropy."""
    return all(group.all_gather_objects(_all_alike(here, read())))


def _all_alike(first: Reading, other: Reading) -> bool:
    if first is None or other is None or len(first) != len(other):
        return False
    return all(alike(a, b) for a, b in zip(first, other, strict=True))


def _difference(readings: Sequence[Reading], different: Sequence[int], option: str, keys: Sequence[Any]) -> str:
    """Return which processes differ, and a sample of two of them."""
    *others, last = different
    named = f"Processes {', '.join(map(str, others))} and {last} read" if others else f"Process {last} reads"
    text = f"{named} other data than process 0."
    for key, ours, theirs in zip(keys, readings[0] or [], readings[different[0]] or [], strict=False):
        if not alike(ours, theirs):
            text += f" {option}[{key!r}] is {shown(ours)} on process 0, and {shown(theirs)} on process {different[0]}."
            break
    return text
