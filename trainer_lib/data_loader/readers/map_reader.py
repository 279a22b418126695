"""Reads map-style datasets, whose samples can be read in any order."""

import copy
from collections.abc import Iterator
from typing import Any, Self

from torch.utils.data import DataLoader

from trainer_lib.data_loader.bad_samples.guarded_dataset import GuardedCollate, GuardedSamples
from trainer_lib.data_loader.bad_samples.sample_quarantine import MarkedKeys, Quarantine, with_row_counts
from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.data_loader.order.epoch_order import announce_epoch, order_of
from trainer_lib.data_loader.order.loader_position import LoaderPosition
from trainer_lib.data_loader.order.rank_batches import BatchSamplerShard
from trainer_lib.data_loader.order.rank_rounds import Ending, Sharing
from trainer_lib.data_loader.order.sample_ids import samples_of_batch
from trainer_lib.data_loader.order.sample_seeds import SeededKeys, SeededSamples
from trainer_lib.data_loader.readers.shard_reader import Reader, look_ahead
from trainer_lib.state.gradient_state import Rows


class MapReader(Reader):
    """Reads a map-style dataset, whose samples can be read in any order.

    Args:
        loader: The user's loader.
        name: The loader's attribute that yields what to read: `batch_sampler`, or `sampler`.
        shard: The share of it that this rank reads.
        seeds_samples: Whether to seed the generators before each sample.
    """

    style = "map"

    def __init__(self, loader: DataLoader[Any], name: str, shard: BatchSamplerShard, seeds_samples: bool) -> None:
        super().__init__(loader, shard.process_index)
        self.unit = "samples" if shard.shares_samples else "batches"
        self._name, self.seeds_samples = name, seeds_samples
        self._quarantine: Quarantine | None = None
        self._use(shard)
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
        self._generator.manual_seed(derived_seed(seed, place.epoch, place.consumed, self.rank, "workers"))
        self.set_epoch(place.epoch)
        if self._keys is not None:
            self._keys.enter(seed, place.epoch)
        if not self.iterates_itself:
            self._shard.enter(seed, place.epoch, place.consumed, ending)
            return self._without_bad(place.epoch, ending)
        own = Ending()
        self._shard.enter(seed, place.epoch, place.consumed, own)
        return look_ahead(self._iterated(), ending, own, by=len(self.sharing.ranks))

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
        announce_epoch(epoch, self.attribute("dataset"), self._shard.batch_sampler, self._shard.sampler)

    def read_for_all(self) -> None:
        """Read the batches of all ranks, one after the other."""
        self._shard.read_for_all()

    def facts(self) -> dict[str, Any]:
        """Return the facts that a position depends on."""
        return {"style": self.style, "unit": self.unit, "length": self._shard.order.length()}

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` is not valid for this loader."""
        self._check_length(state, self._shard.order.length())

    def samples(self, seed: int, epoch: int, start: int, rank: int, rows: Rows | None) -> list[Any] | None:
        """Return the indices of the samples in a rank's batch; see `Reader.samples`."""
        del rows
        if self.iterates_itself or (self.loader.num_workers and not self.loader.in_order):
            return None
        return samples_of_batch(self._shard, seed, epoch, start, rank)

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
        batch_sampler = copy.copy(self._shard.batch_sampler)
        batch_sampler.sampler = sampler  # type: ignore[attr-defined]
        shard = copy.copy(self._shard)
        shard.batch_sampler, shard.order = batch_sampler, order_of(sampler)
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
        source: Any = self._keys or shard
        if self._quarantine is not None:
            source = self._marks = MarkedKeys(source, by_batches, self.seeds_samples)
        self.swap(self._name, source)

    def _guard_collate(self, collate: Any) -> None:
        self.swap("collate_fn", GuardedCollate(collate, self._samples, is_batched=self._name == "batch_sampler"))
