"""This file is samples that raise: each error names its sample, and where it is wanted the rest of the batch goes on.

What is here runs where samples are read: in a worker, or in the process itself.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.foundation.errors import BadSampleError

_TRIES = 64  # samples that may stand in for a batch of which nothing is left


class BadSample(NamedTuple):
    """A sample that could not be read."""

    index: Any
    worker: int | None  # None: the process itself
    error: str


class Sifted(NamedTuple):
    """A batch from which samples were left out."""

    batch: Any
    bad: list[BadSample]
    kept: list[int]  # the places of those that are left; none: the batch only stands in


class Marked(list[Any]):
    """The keys of a batch of which some are `LeftOut`."""


class LeftOut(NamedTuple):
    """The key of a sample that is not to be read."""

    key: Any


class Survivors(NamedTuple):
    """On the way to the collate function: what it takes, and what was left out."""

    samples: Any
    bad: list[BadSample]
    kept: list[int]


class GuardedSamples:
    """A map-style dataset whose errors name the sample.

    Attributes are those of the dataset inside, for reading and for setting.

    Args:
        dataset: The dataset.
        is_keyed: Its keys are those of `SeededKeys`.
    """

    dataset: Any
    is_keyed: bool
    leaves_out: bool
    in_hand: Any

    def __init__(self, dataset: Any, is_keyed: bool) -> None:
        self.dataset, self.is_keyed = dataset, is_keyed
        self.leaves_out = False
        self.in_hand = ()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        """Return what the dataset has for a key."""
        self.__dict__["in_hand"] = (key,)
        if type(key) is LeftOut:
            return Survivors(self._stand_in(key.key), [], [])
        try:
            return self.dataset[key]
        except Exception as error:
            if not self.leaves_out:
                self.name(error, key)
                raise
            return Survivors(self._stand_in(key), [self.bad(key, error)], [])

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        """Return several samples; without the bad ones, if these are left out."""
        self.__dict__["in_hand"] = keys  # not by setattr, which is the dataset's
        if type(keys) is Marked:
            return self._sifted(keys)
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return self._one_by_one(keys)
        try:
            return fetch(keys)
        except Exception as error:
            if self.leaves_out:
                return self._sifted(keys)
            self._find(keys)
            told = ", ".join(repr(self.index_of(key)) for key in keys)
            error.add_note(f"In one of the samples {told}{by_worker()}.")
            raise

    def name(self, error: Exception, key: Any) -> None:
        """Note on an error which sample it is of."""
        note = f"In sample {self.index_of(key)!r}{by_worker()}."
        if isinstance(error, StopIteration):  # would end the pass as if there were no more
            other = RuntimeError("The dataset raised StopIteration, which ends a loop, for a sample.")
            other.add_note(note)
            raise other from error
        error.add_note(note)

    def bad(self, key: Any, error: Exception) -> BadSample:
        """Return a sample that could not be read, with why."""
        worker = get_worker_info()
        text = f"{type(error).__name__}: {error}"
        return BadSample(_plain(self.index_of(key)), None if worker is None else worker.id, text)

    def index_of(self, key: Any) -> Any:
        """Return the index of the sample that a key is of."""
        key = _bare(key)
        return key[1] if self.is_keyed else key

    def stand_in(self) -> Any:
        """Return a sample in the place of a batch of which nothing is left."""
        return self._stand_in(_bare(self.in_hand[0]))

    def read(self, key: Any) -> Any:
        """Return one sample as it comes in a batch."""
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.dataset[key] if fetch is None else fetch([key])[0]

    def _one_by_one(self, keys: Sequence[Any]) -> Any:
        samples: list[Any] = []
        dataset = self.dataset
        try:
            for key in keys:
                samples.append(dataset[key])  # noqa: PERF401 - how many there are says which of them raised
        except Exception as error:
            if self.leaves_out:
                return self._sifted(keys, samples, error)
            self.name(error, keys[len(samples)])
            raise
        return samples

    def _sifted(self, keys: Sequence[Any], read: Sequence[Any] = (), error: Exception | None = None) -> Any:
        """Return the samples that can be read; those that were read already are not read again."""
        samples, bad, kept = list(read), list[BadSample](), list(range(len(read)))
        if error is not None:
            bad.append(self.bad(keys[len(read)], error))
        for place in range(len(read) + (error is not None), len(keys)):
            key = keys[place]
            if type(key) is LeftOut:
                continue
            try:
                samples.append(self.read(key))
            except Exception as failure:  # noqa: BLE001 - whatever a sample raises
                bad.append(self.bad(key, failure))
            else:
                kept.append(place)
        return Survivors(samples or 2 * [self._stand_in(_bare(keys[0]))], bad, kept)  # BatchNorm wants two

    def _find(self, keys: Sequence[Any]) -> None:
        """Raise as the first sample does that cannot be read alone."""
        for key in keys:
            try:
                self.read(key)
            except Exception as error:
                self.name(error, key)
                raise

    def _stand_in(self, key: Any) -> Any:
        # The next one that can be read: whatever was read before, and so also after a resume.
        seed, index = key if self.is_keyed else (None, key)
        apart = RandomStream(0) if get_worker_info() is None else nullcontext()
        failure: Exception | None = None
        with apart:
            for further in range(1, min(_TRIES, len(self.dataset))):
                try:
                    other = (index + further) % len(self.dataset)
                    return self.read((seed, other) if self.is_keyed else other)
                except Exception as error:  # noqa: BLE001 - whatever a sample raises
                    failure = error
        raise BadSampleError(
            f"Of a whole batch no sample could be read, and none of those after {index!r} could stand in: "
            f"{type(failure).__name__}: {failure}"
        ) from failure

    def __getattr__(self, name: str) -> Any:
        """Return what else the dataset has."""
        if name == "dataset" or name.startswith("__"):  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not this object's own on the dataset."""
        if name in GuardedSamples.__annotations__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class GuardedCollate:
    """A collate function whose errors name the samples, and which tells what was left out.

    Args:
        collate: The user's function.
        samples: Where the samples come from.
        is_batched: Whether it gets a list of samples, and not what the dataset has as a batch.
    """

    def __init__(self, collate: Callable[[Any], Any], samples: GuardedSamples, is_batched: bool) -> None:
        self.collate, self._samples, self._is_batched = collate, samples, is_batched

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        if type(samples) is Survivors:
            return self._survivors(samples)
        try:
            return self.collate(samples)
        except Exception as error:
            if self._samples.leaves_out:
                return self._survivors(Survivors(samples, [], list(range(len(self._samples.in_hand)))))
            culprits = self._alone(samples, list(range(len(self._samples.in_hand))))
            self._name(error, [place for place, _ in culprits])
            raise

    def _survivors(self, found: Survivors) -> Sifted:
        try:
            return Sifted(self.collate(found.samples), found.bad, found.kept)
        except Exception as error:
            culprits = self._alone(found.samples, found.kept)
            if not culprits:
                self._name(error, [])
                raise
            bad = [self._samples.bad(self._samples.in_hand[place], why) for place, why in culprits]
            out = {place for place, _ in culprits}
            kept = [place for place in found.kept if place not in out]
            if kept:
                rest: Any = [one for place, one in zip(found.kept, found.samples, strict=True) if place not in out]
            else:
                rest = 2 * [self._samples.stand_in()] if self._is_batched else self._samples.stand_in()
            return Sifted(self.collate(rest), [*found.bad, *bad], kept)

    def _alone(self, samples: Any, places: list[int]) -> list[tuple[int, Exception]]:
        """Return which samples cannot be collated even alone, and why."""
        culprits: list[tuple[int, Exception]] = []
        for place, sample in zip(places, samples if self._is_batched else [samples], strict=False):
            try:
                self.collate([sample] if self._is_batched else sample)
            except Exception as error:  # noqa: BLE001 - whatever a collate function raises
                culprits.append((place, error))
        return culprits

    def _name(self, error: Exception, places: list[int]) -> None:
        keys = self._samples.in_hand
        if len(places) == 1:
            self._samples.name(error, keys[places[0]])
            return
        told = ", ".join(repr(self._samples.index_of(key)) for key in keys)
        error.add_note(f"In the batch of samples {told}{by_worker()}.")


def by_worker() -> str:
    """Return by which worker, in words, if this is one."""
    worker = get_worker_info()
    return "" if worker is None else f", read by worker {worker.id}"


def _bare(key: Any) -> Any:
    return key.key if type(key) is LeftOut else key


def _plain(index: Any) -> Any:
    """Return an index as it can be written down."""
    if isinstance(index, str):
        return index
    try:
        return index.__index__()
    except AttributeError:
        return repr(index)
