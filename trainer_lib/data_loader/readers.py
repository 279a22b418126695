"""This file is reading a user's loader: a copy of it, in which the sampler (or the dataset) is swapped for our share.

Everything else of the loader stays: its class, collate function, workers, pinning, attributes.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from trainer_lib.data_loader.batches import BatchSamplerShard
from trainer_lib.data_loader.evening import evened
from trainer_lib.data_loader.iterable import IterableDatasetShard, TailCollate
from trainer_lib.data_loader.order import announce_epoch, order_of
from trainer_lib.data_loader.position import Place
from trainer_lib.data_loader.randomness import derived_seed
from trainer_lib.data_loader.rounds import Ending, Sharing
from trainer_lib.data_loader.sample_seeds import SeededKeys, SeededSamples
from trainer_lib.foundation.errors import StateError
from trainer_lib.process_group import ProcessGroup

_BATCHES_A_BOOKMARK = 16


class Reader(ABC):
    """A copy of a user's loader that reads the share of a process, from any place on.

    Args:
        loader: The user's loader, which stays as it is.
        rank: The process.
    """

    style: str
    unit: str  # what positions count: "samples", or "batches" that come ready

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader = _copied(loader)
        self.rank = rank
        self._replaced: dict[str, Any] = {}
        # Workers are seeded from it. One of our own, so that neither reading nor resuming draws from training's.
        self._generator = torch.Generator()
        self.swap("generator", self._generator)

    @property
    @abstractmethod
    def sharing(self) -> Sharing:
        """How units are shared."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The units that all processes together read while this one reads a batch."""

    @property
    @abstractmethod
    def total_batch_size(self) -> int | None:
        """The samples of a round over all processes, if that is known."""

    @property
    @abstractmethod
    def even_batches(self) -> bool:
        """Whether the last round is filled."""

    @even_batches.setter
    @abstractmethod
    def even_batches(self, even_batches: bool) -> None: ...

    @abstractmethod
    def open(self, place: Place, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a place on; `ending` is told the end before the last batch comes."""

    @abstractmethod
    def length(self) -> int:
        """Return how many batches the process reads in a pass."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to those objects of the user's who want to know."""

    @abstractmethod
    def read_for_all(self) -> None:
        """Read the batches of all processes, one after the other."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what a position depends on."""

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` means nothing here."""

    @abstractmethod
    def duplicate(self) -> "Reader":
        """Return another one for the same loader."""

    def bookmark_before(self, position: int) -> Any:
        """Return what helps to get to a position of the pass being read, if anything does."""
        del position

    def swap(self, name: str, value: Any) -> None:
        """Replace an attribute of the copy; the user goes on seeing the old value."""
        self._replaced.setdefault(name, self.loader.__dict__.get(name))
        # Not setattr: torch forbids most of these.
        self.loader.__dict__[name] = value

    def attribute(self, name: str) -> Any:
        """Return an attribute of the loader as the user knows it."""
        return self._replaced[name] if name in self._replaced else getattr(self.loader, name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        setattr(self.loader, name, value)

    @property
    def iterates_itself(self) -> bool:
        """Whether the loader's class iterates in a way of its own."""
        return not type(self.loader).__iter__.__module__.startswith(("torch.utils.data", "torchdata."))

    def _check_length(self, state: dict[str, Any], length: int | None) -> None:
        if None not in (length, state["length"]) and length != state["length"]:
            raise StateError(
                f"This state was saved with {state['length']} {self.unit} a pass, and the loader has {length} now; "
                "another number of samples gives another order. Load it into a loader of the same dataset."
            )


class MapReader(Reader):
    """Reads a map-style dataset, whose samples can be had in any order.

    Args:
        loader: The user's loader.
        name: Which attribute of it says what to read: `batch_sampler`, or `sampler`.
        shard: Our share of that.
        seeds_samples: Seed the generators before each sample.
    """

    style = "map"

    def __init__(self, loader: DataLoader[Any], name: str, shard: BatchSamplerShard, seeds_samples: bool) -> None:
        super().__init__(loader, shard.process_index)
        self.unit = "samples" if shard.shares_samples else "batches"
        self._name, self._seeds_samples = name, seeds_samples
        self._use(shard)
        if seeds_samples:
            self.swap("dataset", SeededSamples(loader.dataset))

    @property
    def shard(self) -> BatchSamplerShard:
        """What says which batches to read."""
        return self._shard

    @property
    def step(self) -> int:
        """The units that all processes together read while this one reads a batch."""
        return self._shard.step

    @property
    def sharing(self) -> Sharing:
        """How units are shared."""
        return self._shard.sharing

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all processes, if that is known."""
        if self.unit == "samples":
            return self.sharing.round_size
        size = self._shard.batch_size
        return size if size is None or self._shard.split_batches else size * self.sharing.processes

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled."""
        return self._shard.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._shard.even_batches = even_batches

    def open(self, place: Place, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a place on."""
        self._generator.manual_seed(derived_seed(seed, place.epoch, place.consumed, self.rank, "workers"))
        self.set_epoch(place.epoch)
        if self._keys is not None:
            self._keys.enter(seed, place.epoch)
        if not self.iterates_itself:
            self._shard.enter(seed, place.epoch, place.consumed, ending)
            return iter(self.loader)
        own = Ending()
        self._shard.enter(seed, place.epoch, place.consumed, own)
        return ahead(iter(self.loader), ending, own, by=len(self.sharing.ranks))

    def length(self) -> int:
        """Return how many batches the process reads in a pass."""
        return self._shard.length_of(self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the samplers and the dataset."""
        announce_epoch(epoch, self.attribute("dataset"), self._shard.batch_sampler, self._shard.sampler)

    def read_for_all(self) -> None:
        """Read the batches of all processes, one after the other."""
        self._shard.read_for_all()

    def facts(self) -> dict[str, Any]:
        """Return what a position depends on."""
        return {"style": self.style, "unit": self.unit, "length": self._shard.order.length()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` means nothing here."""
        self._check_length(state, self._shard.order.length())

    def attribute(self, name: str) -> Any:
        """Return an attribute of the loader as the user knows it; of the batch sampler, our share."""
        if name == self._name:
            return self._shard
        return self._shard.sampler if name == "sampler" and self._shard.shares_samples else super().attribute(name)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        batch_sampler = copy.copy(self._shard.batch_sampler)
        batch_sampler.sampler = sampler  # type: ignore[attr-defined]
        shard = copy.copy(self._shard)
        shard.batch_sampler, shard.order = batch_sampler, order_of(sampler)
        self._use(shard)

    def duplicate(self) -> "MapReader":
        """Return another one for the same loader."""
        other = copy.copy(self)
        other._replaced = dict(self._replaced)
        other.loader = _copied(self.loader)
        other._generator = torch.Generator()
        other.swap("generator", other._generator)
        other._use(copy.copy(self._shard))
        return other

    def _use(self, shard: BatchSamplerShard) -> None:
        self._shard = shard
        self._keys = SeededKeys(shard, by_batches=self._name == "batch_sampler") if self._seeds_samples else None
        self.swap(self._name, self._keys or shard)


class IterableReader(Reader):
    """Reads an iterable dataset, whose samples come in an order of its own.

    Args:
        loader: The user's loader.
        sharing: How its samples are shared.
        rank: The process.
        group: The processes, if each of them has samples of its own already and they have to end together.
        split_among: Among how many processes the dataset is split already.
    """

    style = "iterable"

    def __init__(
        self, loader: DataLoader[Any], sharing: Sharing, rank: int, group: ProcessGroup | None, split_among: int
    ) -> None:
        super().__init__(loader, rank)
        self._group, self._split_among = group, split_among
        self._own = self._sharing = sharing
        self._is_batched = loader.batch_sampler is not None
        self.unit = "samples" if self._is_batched else "batches"
        self._bookmarks: deque[dict[str, Any]] = deque(maxlen=2)
        self._install(loader.dataset, loader.collate_fn)

    @property
    def sharing(self) -> Sharing:
        """How units are shared."""
        return self._sharing

    @property
    def step(self) -> int:
        """The units that all processes together read while this one reads a batch."""
        return self._own.round_size

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all processes, if that is known."""
        return self._own.round_size * self._split_among if self._is_batched else None

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled."""
        return self._own.fill

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        fill = even_batches and self._own.processes * self._split_among > 1
        self._own, self._sharing = replace(self._own, fill=fill), replace(self._sharing, fill=fill)
        self._shard.share(self._sharing)

    def open(self, place: Place, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a place on."""
        by_process = (self.rank,) if self._split_among > 1 else ()
        self._generator.manual_seed(derived_seed(seed, place.epoch, *by_process, "workers"))
        self.set_epoch(place.epoch)
        if self._group is None or not self.even_batches:
            return self._batches(place, seed, ending)
        own = Ending()
        return evened(self._batches(place, seed, own), own, ending, self._group)

    def length(self) -> int:
        """Return how many batches the process reads in a pass."""
        return self._own.batches(len(self.attribute("dataset")))

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the epoch."""
        announce_epoch(epoch, self.attribute("dataset"))

    def read_for_all(self) -> None:
        """Read the batches of all processes, one after the other."""
        self._sharing = replace(self._sharing, ranks=tuple(range(self._sharing.processes)))
        self._shard.share(self._sharing)

    def facts(self) -> dict[str, Any]:
        """Return what a position depends on."""
        return {
            "style": self.style,
            "unit": self.unit,
            "length": _length(self.attribute("dataset")),
            "num_workers": self.loader.num_workers,
            "round": self.step,
            "split_among": self._split_among,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` means nothing here."""
        facts = self.facts()
        self._check_length(state, facts["length"])
        if state["split_among"] != self._split_among:
            raise StateError(
                f"The dataset was split among {state['split_among']} processes when this state was saved, and is among "
                f"{self._split_among} now; each had an order of its own. Go on with as many, or do not split it: the "
                "loader shares it out itself."
            )
        before, now = max(1, state["num_workers"]), max(1, facts["num_workers"])
        if before != now:
            raise StateError(
                f"num_workers was {state['num_workers']} when this state was saved, and is {facts['num_workers']} now. "
                "Workers share an iterable dataset among themselves, so the order would be another. Go on with "
                f"num_workers={state['num_workers']}."
            )
        if now > 1 and state["round"] != self.step:
            raise StateError(
                f"All processes together read {state['round']} {self.unit} a round when this state was saved, and "
                f"{self.step} now; with num_workers={now} the order of an iterable dataset depends on it. Keep batch "
                "size times processes, or read with num_workers of 0 or 1."
            )

    def bookmark_before(self, position: int) -> Any:
        """Return what helps to get to a position of the pass being read, if anything does."""
        if self.loader.num_workers == 0:
            return self._shard.bookmark_before(position)
        fitting = [bookmark for bookmark in self._bookmarks if bookmark["position"] <= position]
        return fitting[-1] if fitting else None

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        if name == "collate_fn":
            self._replaced["collate_fn"] = value
            value = TailCollate(value, self._own.share if self._is_batched else None)
        super().set_attribute(name, value)

    def duplicate(self) -> "IterableReader":
        """Return another one for the same loader."""
        other = copy.copy(self)
        other._replaced = dict(self._replaced)
        other.loader = _copied(self.loader)
        other._generator = torch.Generator()
        other._bookmarks = deque(maxlen=2)
        other.swap("generator", other._generator)
        other._install(self.attribute("dataset"), self.attribute("collate_fn"))
        return other

    def _install(self, dataset: Any, collate: Any) -> None:
        shard = self._shard = IterableDatasetShard(dataset)
        shard.share(self.sharing)
        shard.mark_tails()
        if self.loader.num_workers:
            shard.share_place_with_workers()
        self.swap("dataset", shard)
        self.swap("collate_fn", TailCollate(collate, self._own.share if self._is_batched else None))
        if self._is_batched:
            # It yields no samples, only how many a batch has.
            self.swap("batch_sampler", BatchSampler(self.loader.sampler, self._own.share, drop_last=False))

    def _batches(self, place: Place, seed: int, ending: Ending) -> Iterator[Any]:
        loader, bookmark = self.loader, place.bookmark
        self._bookmarks.clear()
        if loader.num_workers == 0:
            own = Ending() if self.iterates_itself else ending
            self._shard.enter(seed, place.epoch, place.consumed, bookmark, own)
            batches = iter(loader)
            return ahead(batches, ending, own, by=len(self.sharing.ranks)) if self.iterates_itself else batches
        if bookmark is not None:
            loader.load_state_dict(bookmark["loader"])  # type: ignore[attr-defined]
            self._bookmarks.append(bookmark)
        # A single worker finds the place by itself; several share the samples in ways of their own.
        skipped = 0 if bookmark is None else bookmark["position"]
        by_worker = loader.num_workers == 1 and bookmark is None
        self._shard.enter(seed, place.epoch, place.consumed if by_worker else 0, None, Ending())
        if by_worker:
            skipped = place.consumed
        batches = self._marked(iter(loader), skipped) if self._loader_keeps_place else iter(loader)
        unwanted = (place.consumed - skipped) // self.step * len(self.sharing.ranks)
        return ahead(islice(batches, unwanted, None), ending, by=len(self.sharing.ranks))

    @property
    def _loader_keeps_place(self) -> bool:
        return len(self.sharing.ranks) == 1 and any(
            kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(self.loader).__mro__
        )

    def _marked(self, batches: Iterator[Any], position: int) -> Iterator[Any]:
        """Yield the batches, and note now and then where the loader's workers are."""
        for count, batch in enumerate(batches, 1):
            position += self.step
            if count % _BATCHES_A_BOOKMARK == 0:
                self._bookmarks.append({"position": position, "loader": self.loader.state_dict()})  # type: ignore[attr-defined]
            yield batch


def ahead(batches: Iterator[Any], ending: Ending, own: Ending | None = None, by: int = 1) -> Iterator[Any]:
    """Yield batches late, so that the end is known before the last ones are handed out.

    Args:
        batches: The batches.
        ending: Is told their number.
        own: What else is known of the end.
        by: How many batches to read ahead.
    """
    waiting: deque[Any] = deque()
    handed_out = 0
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > by:
            handed_out += 1
            yield waiting.popleft()
    if own is not None:
        ending.over, ending.remainder, ending.rows = own.over, own.remainder, own.rows
    ending.batches = handed_out + len(waiting)
    while waiting:
        yield waiting.popleft()


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a shallow copy of a loader that shares no running workers with it."""
    duplicate = copy.copy(loader)
    duplicate.__dict__["_iterator"] = None
    return duplicate


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
