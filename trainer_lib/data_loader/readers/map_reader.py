"""Reads map-style datasets, whose samples can be read in any order."""

import copy
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, default_collate

from trainer_lib.data_loader.bad_samples.guarded_dataset import GuardedCollate, GuardedSamples
from trainer_lib.data_loader.bad_samples.sample_quarantine import MarkedKeys, Quarantine, with_row_counts
from trainer_lib.data_loader.order.batch_sampler_shard import BatchSamplerShard
from trainer_lib.data_loader.order.epoch_order import ComputedOrder, announce_epoch, samplers_in, with_samplers
from trainer_lib.data_loader.order.epoch_start import (
    EpochStart,
    EpochStream,
    generators_of,
    set_state,
    state_of,
)
from trainer_lib.data_loader.order.loader_position import LoaderPosition, Pass
from trainer_lib.data_loader.order.sample_ids import samples_of_batch
from trainer_lib.data_loader.order.sample_seeds import SeededKeys, SeededSamples
from trainer_lib.data_loader.order.samples_per_rank import Ending, Sharing
from trainer_lib.data_loader.readers.reader import Reader, look_ahead
from trainer_lib.data_loader.readers.row_batches import faster_collate, has_columns
from trainer_lib.state.gradient_state import Rows

if TYPE_CHECKING:
    from trainer_lib.data_loader.order.held_generators import HeldGenerators

_CHUNK = 4096  # units drawn at once to get to the end of a pass


class MapReader(Reader):
    """Reads a map-style dataset, whose samples can be read in any order.

    Args:
        loader: The user's loader.
        name: The loader's attribute that yields what to read: `batch_sampler`, or `sampler`.
        shard: The share of it that this rank reads.
        source: The sampler or batch sampler that is divided, in its own order.
        seeds_samples: Whether to seed the generators before each sample.
        low_memory: Whether the order is computed from seed and epoch.
    """

    seeds_samples: bool

    style = "map"

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        shard: BatchSamplerShard,
        source: Any,
        seeds_samples: bool,
        low_memory: bool,
    ) -> None:
        super().__init__(loader, shard.process_index)
        self._source = source
        self.unit = "samples" if shard.shares_samples else "batches"
        self._name, self.seeds_samples = name, seeds_samples
        self._quarantine: Quarantine | None = None
        self._use(shard)
        self.use_low_memory(low_memory)
        self._samples = GuardedSamples(
            SeededSamples(loader.dataset) if seeds_samples else loader.dataset, seeds_samples
        )
        self.swap("dataset", self._samples)
        self._guard_collate(loader.collate_fn)

    @property
    def shard(self) -> BatchSamplerShard:
        """The batch sampler that yields the batches to read."""
        return self._shard

    @property
    def step(self) -> int:
        """The units that all ranks together read while this rank reads a batch."""
        return self._shard.step

    @property
    def sharing(self) -> Sharing:
        """How units are divided between ranks."""
        return self._shard.sharing

    @property
    def deals_whole_batches(self) -> bool:
        """Whether a unit is a batch, delivered as it is."""
        return not self._shard.shares_samples and not self._shard.cuts_batches

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all ranks; `None` if unknown."""
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

    def trim_repeats(self) -> None:
        """Of samples repeated to make ranks even, read only the ones that a rank needs to take part."""
        self._shard.trim_repeats()

    def keep_last(self) -> None:
        """Read an incomplete last round, whatever the loader's `drop_last` is."""
        self._shard.keep_last()

    def open(self, place: LoaderPosition, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a position on."""
        # Workers draw other numbers on each rank, and after a resume.
        keys = place.consumed, self.rank
        stream = self._begin(place, seed, keys, as_torch=not any(keys))
        if self._keys is not None:
            self._keys.enter(seed, place.epoch)
        if not self.iterates_itself:
            full = self._shard.full_batch if self.loader.in_order or not self.loader.num_workers else None
            ending.sizes = None if full is None else deque()
            self._shard.enter(seed, place, ending, stream)
            batches = self._without_bad(place.epoch, ending)
            if full is None:
                return batches
            from trainer_lib.data_loader.order.batch_counts import with_sample_counts  # for few loaders

            return with_sample_counts(batches, ending, self.sharing, full)
        own = Ending()
        self._shard.enter(seed, place, own, stream)
        return look_ahead(self._iterated(), ending, own, by=len(self.sharing.ranks))

    @property
    def order_generators(self) -> list[Any]:
        """The generators that the user's samplers hold and the order follows from."""
        return [] if isinstance(self._shard.order, ComputedOrder) else generators_of(self._shard.order.source)

    @property
    def draws_from(self) -> tuple[str, ...]:
        """The global generators that the order may draw from, by name."""
        return self._shard.order.draws_from

    @property
    def sample_generators(self) -> "HeldGenerators":
        """The generators that the dataset and the collate function hold."""
        from trainer_lib.data_loader.order.held_generators import HeldGenerators  # for saves and evaluations

        return HeldGenerators({name: self._replaced[name] for name in ("dataset", "collate_fn")})

    def _open_order(self, start: EpochStart, stream: EpochStream) -> torch.Tensor | None:
        return self._shard.order.open(start, stream, self.users_generator)

    def use_low_memory(self, low_memory: bool) -> None:
        """Compute the order of a random sampler from seed and epoch, or list it."""
        if low_memory != self.low_memory:
            self.low_memory = low_memory
            shard = copy.copy(self._shard)
            shard.use_source(self._source if not low_memory else with_samplers(self._source, False, low_memory=True))
            self._use(shard)

    def skip_bad_samples(self, quarantine: Quarantine) -> None:
        """Skip samples that cannot be read, and add them to `quarantine`."""
        if self.iterates_itself:
            super().skip_bad_samples(quarantine)
        self._quarantine = quarantine
        self._samples = copy.copy(self._samples)
        self._samples.skips = True
        self.swap("dataset", self._samples)
        self._guard_collate(self._replaced["collate_fn"])
        self._use(self._shard)

    def _without_bad(self, epoch: int, ending: Ending) -> Iterator[Any]:
        if self._quarantine is None:
            return self._iterated()
        self._marks.skipped = self._quarantine.before(epoch)
        whole = self.deals_whole_batches
        return with_row_counts(self._iterated(), self._quarantine, epoch, ending, self.sharing, whole)

    def length(self, behind: int = 0) -> int:
        """Return how many batches the rank still reads in a pass after `behind` units."""
        return self._shard.length_of(self.rank, behind)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset."""
        announce_epoch(epoch, self.attribute("dataset"), *samplers_in(self._shard.batch_sampler))

    def read_for_all(self) -> None:
        """Read the batches of all ranks, one after the other."""
        self._shard.read_for_all()

    def facts(self) -> dict[str, Any]:
        """Return the facts that a position depends on."""
        return {"style": self.style, "unit": self.unit, "length": self._shard.order.length()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` is not valid for this loader."""
        self._check_length(state, self._shard.order.length())

    def generator_states_after(self, seed: int, reading: Pass) -> list[Any]:
        """Return the states that generators have when a pass is read to its end."""
        order = self._shard.order
        if isinstance(order, ComputedOrder) or reading.start is None or hasattr(order.source, "__next__"):
            return self.generator_states()
        generators = self._generators
        units, copies = order.replay_aside(seed, reading.epoch, reading.start, generators, self.users_generator)
        while units.draw(_CHUNK):
            pass
        return [state_of(copies[id(generator)]) for generator in generators]

    def leave(self, seed: int, reading: Pass) -> None:
        """Set the generators of a user's sampler to where torch has drawn them when a pass is left."""
        order, asked, generators = self._shard.order, self._shard.asked(reading.start), self._generators
        if (
            not asked
            or isinstance(order, ComputedOrder)
            or not self.order_generators
            or hasattr(order.source, "__next__")
        ):
            return
        units, copies = order.replay_aside(
            seed, reading.epoch, reading.start, generators, self.users_generator, at_once=1
        )
        by_workers = self.loader.num_workers * (self.loader.prefetch_factor or 0) * self.step
        by_torch = min(reading.consumed + by_workers, asked)
        units.skip(by_torch)
        states = [state_of(copies[id(generator)]) for generator in generators]
        units.skip(asked - by_torch)
        # Unless something else has drawn from them in the meantime.
        if all(state_of(generator) == state_of(copies[id(generator)]) for generator in generators):
            for generator, state in zip(generators, states, strict=True):
                set_state(generator, state)

    def samples(
        self, seed: int, reading: LoaderPosition | Pass, start: int, rank: int, rows: Rows | None
    ) -> list[Any] | None:
        """Return the indices of the samples in a rank's batch; see `Reader.samples`."""
        del rows
        if self.iterates_itself or (self.loader.num_workers and not self.loader.in_order):
            return None
        return samples_of_batch(self._shard, seed, reading.epoch, start, rank, partial(self._units, seed, reading))

    def _units(self, seed: int, reading: LoaderPosition | Pass, first: int, last: int) -> list[Any]:
        """Return the units between two positions of a pass, without training's random numbers."""
        shard, order = self._shard, self._shard.order
        drawn = shard.drawn(reading.start, last)
        if drawn is not None:
            return drawn[first:last]
        assert not isinstance(order, ComputedOrder)
        units, _ = order.replay_aside(seed, reading.epoch, reading.start, self._generators, self.users_generator)
        units.skip(first)
        return units.draw(last - first)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        if name == "collate_fn":
            self._replaced["collate_fn"] = value
            self._guard_collate(value)
        else:
            super().set_attribute(name, value)

    def attribute(self, name: str) -> Any:
        """Return an attribute of the loader as the user set it; for the batch sampler, this rank's share."""
        if name == self._name:
            return self._shard
        return self._shard.sampler if name == "sampler" and self._shard.shares_samples else super().attribute(name)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        if not self._shard.shares_samples:
            super().set_sampler(sampler)
        source: Any = copy.copy(self._shard.batch_sampler)
        source.sampler = sampler
        self._source = source
        shard = copy.copy(self._shard)
        shard.use_source(self._source)
        self._use(shard)

    def duplicate(self) -> Self:
        """Return another reader for the same loader."""
        other = super().duplicate()
        other._use(copy.copy(self._shard))
        return other

    def _use(self, shard: BatchSamplerShard) -> None:
        self._shard = shard
        by_batches = self._name == "batch_sampler"
        self._keys = SeededKeys(shard, by_batches) if self.seeds_samples else None
        source: Any = shard if self._keys is None else self._keys  # its truth would be its length
        if self._quarantine is not None:
            source = self._marks = MarkedKeys(source, by_batches, self.seeds_samples)
        self.swap(self._name, source)

    def _guard_collate(self, collate: Any) -> None:
        is_batched = self._name == "batch_sampler"
        is_plain = is_batched and collate is default_collate and not self.iterates_itself
        self._samples.reads_columns = is_plain and has_columns(self._samples.dataset)
        self.swap("collate_fn", GuardedCollate(faster_collate(collate), self._samples, is_batched=is_batched))
