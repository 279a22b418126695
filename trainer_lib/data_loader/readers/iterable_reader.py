"""Reads iterable datasets, whose samples come in the order that the dataset yields."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler, DataLoader

from trainer_lib.data_loader.order.data_rng import GLOBAL_GENERATORS
from trainer_lib.data_loader.order.epoch_order import announce_epoch
from trainer_lib.data_loader.order.epoch_start import EpochStream, started, unique
from trainer_lib.data_loader.order.held_generators import HeldGenerators, generators_of_dataset
from trainer_lib.data_loader.order.loader_position import LoaderPosition, Pass
from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending, Sharing
from trainer_lib.data_loader.order.uneven_end import until_all_end
from trainer_lib.data_loader.readers.iterable_dataset_shard import IterableDatasetShard, ShardOfItsClass, TailCollate
from trainer_lib.data_loader.readers.reader import Reader, look_ahead
from trainer_lib.data_loader.readers.row_batches import faster_collate
from trainer_lib.foundation.errors import StateError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows

_logger = get_logger(__name__)

_BATCHES_PER_BOOKMARK = 16


class IterableReader(Reader):
    """Reads an iterable dataset, in the order that it yields.

    Args:
        loader: The user's loader.
        sharing: How its samples are divided between ranks.
        rank: The rank.
        world: How many ranks should have the same number of batches.
        split_among: Between how many of them the dataset is already split.
        group: The ranks, if each already has its own samples and they have to end together.
    """

    style = "iterable"
    _has_warned = _has_compared_workers = False

    def __init__(
        self,
        loader: DataLoader[Any],
        sharing: Sharing,
        rank: int,
        world: int,
        split_among: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(loader, rank)
        self._world, self._split_among, self._group = world, split_among, group
        self._rank_sharing = self._sharing = sharing
        self._is_batched = loader.batch_sampler is not None
        self.unit = "samples" if self._is_batched else "batches"
        self._bookmarks: deque[dict[str, Any]] = deque(maxlen=2)
        generator = getattr(loader.dataset, "generator", None)
        named = [generator] if isinstance(generator, torch.Generator) else []
        self._held = unique([*named, *generators_of_dataset(loader.dataset)])
        self._install(loader.dataset, loader.collate_fn)

    @property
    def sharing(self) -> Sharing:
        """How units are divided between ranks."""
        return self._sharing

    @property
    def step(self) -> int:
        """The units that all ranks together read while this rank reads a batch."""
        return self._rank_sharing.round_size

    @property
    def deals_whole_batches(self) -> bool:
        """Whether a unit is a batch, delivered as it is."""
        return not self._is_batched

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all ranks; `None` if unknown."""
        return self._rank_sharing.round_size * self._split_among if self._is_batched else None

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled."""
        return self._rank_sharing.fill

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        fill = even_batches and self._world > 1
        self._rank_sharing, self._sharing = replace(self._rank_sharing, fill=fill), replace(self._sharing, fill=fill)
        self._shard.share(self._sharing)

    @property
    def counts_alike(self) -> bool:
        """Whether every rank knows how many samples all ranks together read in a round."""
        return self.total_batch_size is not None and self._split_among == 1

    @property
    def reads_alike(self) -> bool:
        """Whether every rank reads the same stream and keeps its part."""
        return self._split_among == 1 and len(self.sharing.ranks) == 1 < self._rank_sharing.processes

    @property
    def opening_digest(self) -> int | None:
        """The digest of the first samples of the current stream; `None` if they were not read here."""
        return self._shard.opening_digest

    def trim_repeats(self) -> None:
        """Of samples repeated to make ranks even, read only the ones that a rank needs to take part."""
        if len(self._sharing.ranks) == 1:  # otherwise the parts of several ranks are batched one after the other
            self._rank_sharing, self._sharing = (
                replace(self._rank_sharing, trims=True),
                replace(self._sharing, trims=True),
            )
            self._shard.share(self._sharing)

    def keep_last(self) -> None:
        """Read an incomplete last round, whatever the loader's `drop_last` is."""
        self._rank_sharing, self._sharing = (
            replace(self._rank_sharing, drop_last=False),
            replace(self._sharing, drop_last=False),
        )
        self._shard.share(self._sharing)
        self.swap("drop_last", False)

    @property
    def knows_end_of_all(self) -> bool:
        """Whether the end that `open` reports is that of all ranks."""
        return self.even_batches or (self._group is None and self.loader.num_workers == 0)

    def open(self, place: LoaderPosition, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a position on."""
        keys = (self.rank,) if self._split_among > 1 else ()
        stream = self._begin(place, seed, keys, as_torch=not any(keys))
        if self._group is None or not self.even_batches:
            return self._batches(place, seed, ending, stream)
        own = Ending()
        return until_all_end(self._batches(place, seed, own, stream), own, ending, self._group)

    @property
    def order_generators(self) -> list[Any]:
        """The generators that the dataset holds when the loader is prepared."""
        return self._held

    @property
    def sample_generators(self) -> HeldGenerators:
        """The generators that the collate function holds."""
        return HeldGenerators({"collate_fn": self._replaced["collate_fn"]})

    @property
    def draws_from(self) -> tuple[str, ...]:
        """The global generators that the dataset may draw from, by name; in workers they follow from torch's."""
        return ("torch",) if self.loader.num_workers else GLOBAL_GENERATORS

    @property
    def agrees_on_start(self) -> bool:
        """Whether all ranks have to start an epoch with the generators of rank 0."""
        return super().agrees_on_start and self._split_among == 1

    @property
    def read_ahead(self) -> int:
        """How many batches are read ahead with workers, so that the last one is known before it is delivered."""
        return len(self.sharing.ranks) if self.loader.num_workers else 0

    def length(self, behind: int = 0) -> int:
        """Return how many batches the rank still reads in a pass after `behind` units."""
        return self._rank_sharing.batches(max(0, len(self.attribute("dataset")) - behind))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset."""
        announce_epoch(epoch, self.attribute("dataset"))

    def read_for_all(self) -> None:
        """Read the batches of all ranks, one after the other."""
        self._sharing = replace(self._sharing, ranks=tuple(range(self._sharing.processes)))
        self._shard.share(self._sharing)

    def facts(self) -> dict[str, Any]:
        """Return the facts that a position depends on."""
        return {
            "style": self.style,
            "unit": self.unit,
            "length": length_of(self.attribute("dataset")),
            "num_workers": self.loader.num_workers,
            "round": self.step,
            "split_among": self._split_among,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` is not valid for this loader."""
        facts = self.facts()
        self._check_length(state, facts["length"])
        if state["split_among"] != self._split_among:
            raise StateError(
                f"The dataset was split between {state['split_among']} ranks when this state was saved, and is split "
                f"between {self._split_among} now; each rank's part had its own order. Resume with "
                f"{state['split_among']} ranks, or do not split the dataset: the loader divides it itself."
            )
        before, now = max(1, state["num_workers"]), max(1, facts["num_workers"])
        if before != now:
            raise StateError(
                f"num_workers was {state['num_workers']} when this state was saved, and is {facts['num_workers']} now. "
                "Workers divide an iterable dataset between them, so the order would change. Resume with "
                f"num_workers={state['num_workers']}."
            )
        if now > 1 and state["round"] != self.step:
            raise StateError(
                f"All ranks together read {state['round']} {self.unit} per round when this state was saved, and read "
                f"{self.step} now; with num_workers={now} the order of an iterable dataset depends on it. Keep batch "
                "size times world size, or set num_workers to 0 or 1."
            )

    def check_read(self, reading: Pass) -> None:
        """Warn, once, if a pass was longer than the length of the dataset."""
        dataset, partial_rounds = self.attribute("dataset"), max(1, self.loader.num_workers)
        length = length_of(dataset)
        read = reading.consumed - partial_rounds * self.step  # each worker may have ended with an incomplete round
        if length is None or read < length or self._has_warned:
            return
        self._has_warned = True
        _logger.warning(
            "%s yields more %s than its __len__ says: %d, and at least %d were read in a pass. The length of an epoch, "
            "schedules and the end of training follow from __len__, so part of the data may never be read. Return the "
            "number of all %s, for all ranks and workers together, or leave __len__ out.",
            *(type(dataset).__name__, self.unit, length, read + 1, self.unit),
        )

    def bookmark_before(self, position: int) -> Any:
        """Return the newest bookmark of the current pass before a position, or `None`."""
        if self.loader.num_workers == 0:
            return self._shard.bookmark_before(position)
        fitting = [bookmark for bookmark in self._bookmarks if bookmark["position"] <= position]
        return fitting[-1] if fitting else None

    def samples(
        self, seed: int, reading: LoaderPosition | Pass, start: int, rank: int, rows: Rows | None
    ) -> list[Any] | None:
        """Return the positions of a batch's samples in the pass; see `Reader.samples`.

        Where each rank has its own samples, they are positions among those.
        """
        del seed, reading
        if self.iterates_itself or (self.loader.num_workers and not self.loader.in_order):
            return None
        share = self._rank_sharing.share
        first = start + (0 if self._split_among > 1 else rank * share)
        return list(range(first, first + (share if rows is None else min(rows.real, share))))

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        if name == "collate_fn":
            self._replaced["collate_fn"] = value
            value = self._counting(value)
        super().set_attribute(name, value)

    def duplicate(self) -> Self:
        """Return another reader for the same loader."""
        other = super().duplicate()
        other._bookmarks = deque(maxlen=2)
        other._install(self.attribute("dataset"), self.attribute("collate_fn"))
        return other

    def _install(self, dataset: Any, collate: Any) -> None:
        kind = ShardOfItsClass if self.iterates_itself else IterableDatasetShard
        shard = self._shard = kind(dataset)
        shard.share(self.sharing)
        shard.mark_tails()
        if self.loader.num_workers:
            shard.share_place_with_workers(self.loader.num_workers)
        self.swap("dataset", shard)
        self.swap("collate_fn", self._counting(collate))
        if self._is_batched:
            # It yields no samples, only the number of them in a batch.
            self.swap("batch_sampler", BatchSampler(self.loader.sampler, self._rank_sharing.share, drop_last=False))

    def _counting(self, collate: Any) -> TailCollate:
        return TailCollate(faster_collate(collate), self._rank_sharing.share if self._is_batched else None)

    def _batches(self, place: LoaderPosition, seed: int, ending: Ending, stream: EpochStream | None) -> Iterator[Any]:
        loader, bookmark = self.loader, self._usable(place.bookmark)
        self._bookmarks.clear()
        if loader.num_workers == 0:
            own = Ending() if self.iterates_itself else ending
            self._shard.enter(seed, place.epoch, place.consumed, bookmark, own, stream)
            batches = self._iterated()
            return look_ahead(batches, ending, own, by=len(self.sharing.ranks)) if self.iterates_itself else batches
        if bookmark is not None:
            loader.load_state_dict(bookmark["loader"])  # type: ignore[attr-defined]
            self._bookmarks.append(bookmark)
        # A single worker finds the position itself; several workers divide the samples in their own way.
        skipped = 0 if bookmark is None else bookmark["position"]
        by_worker = loader.num_workers == 1 and bookmark is None
        self._shard.enter(seed, place.epoch, place.consumed if by_worker else 0, None, Ending(), stream)
        if by_worker:
            skipped = place.consumed
        batches = self._iterated()
        if loader.num_workers > 1 and not self._has_compared_workers:
            batches = self._comparing_workers(batches)
        if self._loader_keeps_place:
            batches = self._marked(batches, skipped)
        unwanted = (place.consumed - skipped) // self.step * len(self.sharing.ranks)
        return look_ahead(islice(batches, unwanted, None), ending, by=len(self.sharing.ranks))

    def _comparing_workers(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Warn, after a batch of each worker, if workers read the same samples."""
        yield from islice(batches, self.loader.num_workers)
        self._has_compared_workers = True
        if alike := self._shard.workers_alike():
            _logger.warning(
                "%d of the %d workers read the same first samples of %s as another one, so samples may be read several "
                "times in an epoch, and others not at all if __len__ ends it: each worker iterates a copy of the whole "
                "dataset. Split it in __iter__: info = torch.utils.data.get_worker_info(), then "
                "itertools.islice(samples, info.id, None, info.num_workers) where info is not None; or set "
                "num_workers=1.",
                *(len(alike), self.loader.num_workers, type(self.attribute("dataset")).__name__),
            )
        yield from batches

    def _usable(self, bookmark: Any) -> Any:
        """Return the bookmark if it is valid here: batches count differently if the loader was divided otherwise."""
        if bookmark is None or self.loader.num_workers == 0:
            return bookmark if bookmark is not None and "dataset" in bookmark else None
        return bookmark if self._loader_keeps_place and bookmark.get("shared") == self._shared else None

    @property
    def _shared(self) -> list[int]:
        return [self._rank_sharing.share, self._rank_sharing.processes, self.rank, self.loader.num_workers]

    def _iterated(self) -> Iterator[Any]:
        if not self.iterates_itself:
            return super()._iterated()
        self._worker_init.note_thread()
        # The user's class must not see batches with counts, and has no public method that makes an iterator once.
        counts: deque[Any] = deque()
        get_iterator = type(self.loader)._get_iterator  # pyright: ignore[reportPrivateUsage]
        self.loader.__dict__["_get_iterator"] = lambda: Uncounted(get_iterator(self.loader), counts)
        return _counted_again(started(iter(self.loader)), counts)

    @property
    def _loader_keeps_place(self) -> bool:
        return len(self.sharing.ranks) == 1 and any(
            kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(self.loader).__mro__
        )

    def _marked(self, batches: Iterator[Any], position: int) -> Iterator[Any]:
        """Yield the batches, and save the state of the loader's workers from time to time."""
        for count, batch in enumerate(batches, 1):
            position += self.step
            if count % _BATCHES_PER_BOOKMARK == 0:
                kept = self.loader.state_dict()  # type: ignore[attr-defined]
                self._bookmarks.append({"position": position, "loader": kept, "shared": self._shared})
            yield batch


class Uncounted:
    """A loader's iterator that removes the counts from batches, and keeps them.

    Args:
        iterator: The iterator.
        counts: Receives the counts, in the order of the batches.
    """

    def __init__(self, iterator: Any, counts: deque[Any]) -> None:
        self._iterator, self._counts = iterator, counts

    def __iter__(self) -> "Uncounted":
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        is_counted = type(batch) is Counted
        self._counts.append(batch[1:] if is_counted else None)
        return batch.batch if is_counted else batch

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the iterator."""
        return getattr(self._iterator, name)


def _counted_again(batches: Iterator[Any], counts: deque[Any]) -> Iterator[Any]:
    for batch in batches:
        count = counts.popleft() if counts else None
        yield batch if count is None else Counted(batch, *count)
