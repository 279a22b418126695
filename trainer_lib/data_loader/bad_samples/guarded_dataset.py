"""Errors of samples: each error names its sample, or the sample is skipped and the rest of the batch is kept.

This code runs where samples are read: in a worker process, or in the training process.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.data_loader.readers.row_batches import ReadBatch, read_batch
from trainer_lib.foundation.errors import BadSampleError

_TRIES = 64  # samples to try as a stand-in for a batch that has lost all its samples


class BadSample(NamedTuple):
    """A sample that could not be read."""

    index: Any
    worker: int | None  # None: read in the training process
    error: str


class FilteredBatch(NamedTuple):
    """A batch from which samples were skipped."""

    batch: Any
    bad: list[BadSample]
    kept: list[int]  # the rows that are left; empty: the batch is only a stand-in


class MarkedBatch(list[Any]):
    """The keys of a batch, some of which are a `SkippedKey`."""


class SkippedKey(NamedTuple):
    """The key of a sample to skip."""

    key: Any


class ReadableSamples(NamedTuple):
    """The input of the collate function, together with the samples that were skipped."""

    samples: Any
    bad: list[BadSample]
    kept: list[int]


class GuardedSamples:
    """A map-style dataset whose errors name the sample.

    Reading or setting an attribute reads or sets it on the dataset inside.

    Args:
        dataset: The dataset.
        is_keyed: Whether its keys are those of `SeededKeys`.
    """

    dataset: Any
    is_keyed: bool
    skips: bool
    reads_columns: bool
    current_keys: Any

    def __init__(self, dataset: Any, is_keyed: bool) -> None:
        self.dataset, self.is_keyed = dataset, is_keyed
        self.skips = False
        self.reads_columns = False  # whether a batch may be read column by column, as nothing but torch collates it
        self.current_keys = ()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        """Return the sample of a key."""
        self.__dict__["current_keys"] = (key,)
        if type(key) is SkippedKey:
            return ReadableSamples(self._stand_in(key.key), [], [])
        try:
            return self.dataset[key]
        except Exception as error:
            if not self.skips:
                self.name(error, key)
                raise
            return ReadableSamples(self._stand_in(key), [self.bad(key, error)], [])

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        """Return several samples; without the bad ones, if those are skipped."""
        self.__dict__["current_keys"] = keys  # setattr would set it on the dataset
        if type(keys) is MarkedBatch:
            return self._filtered(keys)
        dataset = self.dataset
        if self.reads_columns and (batch := read_batch(dataset, keys)) is not None:
            return batch
        fetch = getattr(dataset, "__getitems__", None)
        if fetch is None:
            return self._one_by_one(keys)
        try:
            return fetch(keys)
        except Exception as error:
            if self.skips:
                return self._filtered(keys)
            self._raise_of_first_bad(keys)
            indices = ", ".join(repr(self.index_of(key)) for key in keys)
            error.add_note(f"In one of the samples {indices}{by_worker()}.")
            raise

    def name(self, error: Exception, key: Any) -> None:
        """Add a note to an error that names its sample."""
        note = f"In sample {self.index_of(key)!r}{by_worker()}."
        if isinstance(error, StopIteration):  # would end the pass as if there were no more samples
            replacement = RuntimeError("The dataset raised StopIteration, which ends a loop, for a sample.")
            replacement.add_note(note)
            raise replacement from error
        error.add_note(note)

    def bad(self, key: Any, error: Exception) -> BadSample:
        """Return the record of a sample that could not be read, with its error."""
        worker = get_worker_info()
        text = f"{type(error).__name__}: {error}"
        return BadSample(_plain(self.index_of(key)), None if worker is None else worker.id, text)

    def index_of(self, key: Any) -> Any:
        """Return the index of a key's sample."""
        key = _bare(key)
        return key[1] if self.is_keyed else key

    def stand_in(self) -> Any:
        """Return a sample to stand in for a batch that has lost all its samples."""
        return self._stand_in(_bare(self.current_keys[0]))

    def read(self, key: Any) -> Any:
        """Return one sample as the dataset returns it in a batch."""
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.dataset[key] if fetch is None else fetch([key])[0]

    def _one_by_one(self, keys: Sequence[Any]) -> Any:
        samples: list[Any] = []
        dataset = self.dataset
        try:
            for key in keys:  # faster than `map`: Python calls a `__getitem__` written in Python without C in between
                samples.append(dataset[key])  # noqa: PERF401 - an error names the sample by how many were read
        except Exception as error:
            if self.skips:
                return self._filtered(keys, samples, error)
            self.name(error, keys[len(samples)])
            raise
        return samples

    def _filtered(self, keys: Sequence[Any], read: Sequence[Any] = (), error: Exception | None = None) -> Any:
        """Return the samples that can be read; those in `read` are not read again."""
        samples, bad, kept = list(read), list[BadSample](), list(range(len(read)))
        if error is not None:
            bad.append(self.bad(keys[len(read)], error))
        for row in range(len(read) + (error is not None), len(keys)):
            key = keys[row]
            if type(key) is SkippedKey:
                continue
            try:
                samples.append(self.read(key))
            except Exception as failure:  # noqa: BLE001 - whatever a sample raises
                bad.append(self.bad(key, failure))
            else:
                kept.append(row)
        return ReadableSamples(samples or 2 * [self._stand_in(_bare(keys[0]))], bad, kept)  # BatchNorm needs two

    def _raise_of_first_bad(self, keys: Sequence[Any]) -> None:
        """Raise the error of the first sample that cannot be read alone."""
        for key in keys:
            try:
                self.read(key)
            except Exception as error:
                self.name(error, key)
                raise

    def _stand_in(self, key: Any) -> Any:
        # The next sample that can be read: independent of what was read before, so the same after a resume.
        seed, index = key if self.is_keyed else (None, key)
        stream = RandomStream(0) if get_worker_info() is None else nullcontext()
        failure: Exception | None = None
        with stream:
            for offset in range(1, min(_TRIES, len(self.dataset))):
                try:
                    candidate = (index + offset) % len(self.dataset)
                    return self.read((seed, candidate) if self.is_keyed else candidate)
                except Exception as error:  # noqa: BLE001 - whatever a sample raises
                    failure = error
        raise BadSampleError(
            f"No sample of a whole batch could be read, and none of the samples after {index!r} either, to stand in "
            f"for it: {type(failure).__name__}: {failure}"
        ) from failure

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset inside."""
        if name == "dataset" or name.startswith("__"):  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the dataset, unless it is one of this class."""
        if name in GuardedSamples.__annotations__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class GuardedCollate:
    """A collate function whose errors name the samples, and which reports skipped samples.

    Args:
        collate: The user's function.
        samples: The dataset that reads the samples.
        is_batched: Whether it gets a list of samples, rather than a batch made by the dataset.
    """

    collate: Callable[[Any], Any]

    def __init__(self, collate: Callable[[Any], Any], samples: GuardedSamples, is_batched: bool) -> None:
        self.collate, self._samples, self._is_batched = collate, samples, is_batched

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        if type(samples) is ReadBatch:
            return [*samples]
        if type(samples) is ReadableSamples:
            return self._collated(samples)
        try:
            return self.collate(samples)
        except Exception as error:
            if self._samples.skips:
                rows = list(range(len(self._samples.current_keys)))
                return self._collated(ReadableSamples(samples, [], rows))
            bad_rows = self._uncollatable(samples, list(range(len(self._samples.current_keys))))
            self._name(error, [row for row, _ in bad_rows])
            raise

    def _collated(self, readable: ReadableSamples) -> FilteredBatch:
        try:
            return FilteredBatch(self.collate(readable.samples), readable.bad, readable.kept)
        except Exception as error:
            bad_rows = dict(self._uncollatable(readable.samples, readable.kept))
            if not bad_rows:
                self._name(error, [])
                raise
            bad = [self._samples.bad(self._samples.current_keys[row], why) for row, why in bad_rows.items()]
            kept = [row for row in readable.kept if row not in bad_rows]
            if kept:
                rows = zip(readable.kept, readable.samples, strict=True)
                rest: Any = [sample for row, sample in rows if row not in bad_rows]
            else:
                rest = 2 * [self._samples.stand_in()] if self._is_batched else self._samples.stand_in()
            return FilteredBatch(self.collate(rest), [*readable.bad, *bad], kept)

    def _uncollatable(self, samples: Any, rows: list[int]) -> list[tuple[int, Exception]]:
        """Return the rows whose samples cannot be collated even alone, and their errors."""
        bad_rows: list[tuple[int, Exception]] = []
        for row, sample in zip(rows, samples if self._is_batched else [samples], strict=False):
            try:
                self.collate([sample] if self._is_batched else sample)
            except Exception as error:  # noqa: BLE001 - whatever a collate function raises
                bad_rows.append((row, error))
        return bad_rows

    def _name(self, error: Exception, rows: list[int]) -> None:
        keys = self._samples.current_keys
        if len(rows) == 1:
            self._samples.name(error, keys[rows[0]])
            return
        indices = ", ".join(repr(self._samples.index_of(key)) for key in keys)
        error.add_note(f"In the batch of samples {indices}{by_worker()}.")


def by_worker() -> str:
    """Return the words that name this worker, or an empty string in the training process."""
    worker = get_worker_info()
    return "" if worker is None else f", read by worker {worker.id}"


def _bare(key: Any) -> Any:
    return key.key if type(key) is SkippedKey else key


def _plain(index: Any) -> Any:
    """Return an index as a text or an int, for JSON."""
    if isinstance(index, str):
        return index
    try:
        return index.__index__()
    except AttributeError:
        return repr(index)
