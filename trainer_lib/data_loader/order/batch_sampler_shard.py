"""A batch sampler for one of several ranks: its part of what a sampler or batch sampler yields."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from trainer_lib.data_loader.order.epoch_order import ComputedOrder, Replay, ReplayedOrder, iterates_as, order_of
from trainer_lib.data_loader.order.epoch_start import EpochStart, EpochStream
from trainer_lib.data_loader.order.loader_position import LoaderPosition
from trainer_lib.data_loader.order.samples_per_rank import Ending, Sharing, completed, deal
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of

_CHUNK = 4096  # samples whose positions are computed at once
_MANY = 1 << 16  # samples taken at once from a sampler that has drawn all of them
# Units drawn from a user's sampler at once: swapping the random generators and back takes 25 µs.
_SAMPLES_AT_ONCE, _BATCHES_AT_ONCE = 256, 8


class BatchSamplerShard(BatchSampler):
    """The batches of another batch sampler that one rank reads.

    The samples of a plain `BatchSampler` are divided: each round is cut from the order of its sampler. The batches of
    any other sampler are divided as they are.

    Args:
        batch_sampler: The other batch sampler.
        num_processes: How many ranks share its batches.
        process_index: The rank.
        split_batches: Each batch is one for all ranks together, of which each takes its slice.
        even_batches: Fill the last round with the first samples, so that all ranks have the same number of batches.

    Example:
        >>> batches = BatchSampler(range(5), batch_size=2, drop_last=False)
        >>> [list(BatchSamplerShard(batches, num_processes=2, process_index=rank)) for rank in range(2)]
        [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        # Not super().__init__: sampler, batch size and drop_last are those of the other batch sampler.
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self._even_batches = even_batches
        self.use_source(batch_sampler)
        self._place: tuple[int, LoaderPosition, Ending, EpochStream | None] | None = None
        self._opened: Replay | None = None
        self._reads_for_all = self._trims = self._keeps_last = self._is_cut_later = False
        self._evened = num_processes
        self.sharing = self._sharing()

    def use_source(self, batch_sampler: Iterable[Any]) -> None:
        """Divide another batch sampler of the same kind."""
        self.batch_sampler = batch_sampler
        self.shares_samples: bool = iterates_as(batch_sampler, "BatchSampler")
        self.order: ComputedOrder | ReplayedOrder = order_of(batch_sampler)

    @property
    def sampler(self) -> Any:
        """The sampler inside the other batch sampler, if there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """The batch size of the other batch sampler, if there is one."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def full_batch(self) -> int | None:
        """The samples in a rank's full batch, if batches are a user's and the batch sampler says how large they are."""
        size = self.batch_size
        if self.shares_samples or self._is_cut_later or not isinstance(size, int):
            return None
        return size // self.num_processes if self.split_batches else size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether an incomplete last round is dropped."""
        return bool(getattr(self.batch_sampler, "drop_last", False)) and not self._keeps_last

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled."""
        return self._even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._even_batches = even_batches
        self.sharing = self._sharing()

    @property
    def total_length(self) -> int:
        """The number of batches of the other batch sampler."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._batches_of(self.sharing)

    def length_of(self, rank: int, behind: int = 0) -> int:
        """Return how many batches a rank still reads after `behind` units, whichever ranks are read here."""
        return self._batches_of(replace(self.sharing, ranks=(rank,)), behind)

    def read_for_all(self) -> None:
        """Read the parts of all ranks, one after the other, on this one."""
        self._reads_for_all = True
        self.sharing = self._sharing()

    def fill_for(self, processes: int) -> None:
        """Fill the last round although a single rank reads it: it is cut for several ranks afterwards."""
        self._evened, self._is_cut_later = processes, True
        self.sharing = self._sharing()

    def trim_repeats(self) -> None:
        """Of the samples that fill the last round, read only the ones that a rank needs to take part."""
        self._trims = True
        self.sharing = self._sharing()

    def keep_last(self) -> None:
        """Read an incomplete last round, whatever `drop_last` of the other batch sampler is."""
        self._keeps_last = True
        self.sharing: Sharing = self._sharing()

    def enter(self, seed: int, place: LoaderPosition, ending: Ending, stream: EpochStream | None = None) -> None:
        """Start the next iteration at a position of the global order, and fill in `ending`.

        Args:
            seed: The seed of the order.
            place: The position.
            ending: Receives how the epoch ends.
            stream: What samplers draw from; `None`: their generators are seeded from seed and epoch.
        """
        self._place, self._opened = (seed, place, ending, stream), None
        length = self.known_length
        if length is not None:
            ending.foresee(self.sharing, 0, min(place.consumed, length), max(0, length - place.consumed))

    def drawn(self, start: EpochStart | None, last: int) -> list[Any] | None:
        """Return the units of the current iteration up to a position, if they were kept.

        Args:
            start: Where the epoch of that position started.
            last: The position.
        """
        if self._opened is None or self._place is None or start is None or self._place[1].start is not start:
            return None
        kept, length = self._opened.opening, self.known_length
        return kept if len(kept) >= last or len(kept) == length else None

    def asked(self, start: EpochStart | None) -> int:
        """Return how many units the epoch that started there has asked of a user's sampler; 0 for other epochs."""
        is_current = self._place is not None and start is not None and self._place[1].start is start
        return self._opened.asked if is_current and self._opened is not None else 0

    @property
    def known_length(self) -> int | None:
        """How many units an epoch has, if that is certain."""
        if self.cuts_batches or not (isinstance(self.order, ComputedOrder) or self.order.is_torchs):
            return None
        return self.order.length()

    def __iter__(self) -> Iterator[Any]:
        if self._place is None:
            # No pass was set: use the one that the sampler itself is at.
            return self._replayed(lambda: Replay(self.order.source, self.step), 0, Ending())
        seed, place, ending, stream = self._place
        order = self.order
        if isinstance(order, ComputedOrder):
            return self._computed(order, order.lookup(seed, place.epoch), place.consumed)

        def opened() -> Replay:
            self._opened = order.replay(seed, place.epoch, stream, self.step, self.at_once)
            self._opened.skip(place.consumed)
            return self._opened

        if self.known_length is not None:
            return self._listed(order, opened, place.consumed, ending)
        return self._replayed(opened, place.consumed, ending)

    @property
    def step(self) -> int:
        """The units that all ranks together read while this rank reads a batch."""
        return 1 if self.cuts_batches else self.sharing.round_size

    @property
    def at_once(self) -> int:
        """How many units to draw from a user's sampler at once."""
        return _SAMPLES_AT_ONCE if self.shares_samples else _BATCHES_AT_ONCE

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other batch sampler."""
        if name == "batch_sampler":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def cuts_batches(self) -> bool:
        """Whether ready batches are cut into slices."""
        return self.split_batches and not self.shares_samples

    def _batches_of(self, sharing: Sharing, behind: int = 0) -> int:
        length = self.order.length()
        if length is None:
            raise TypeError(f"{type(self.batch_sampler).__name__} has no length, so its share for a rank has none.")
        length = max(0, length - behind)
        return length * len(sharing.ranks) if self.cuts_batches else sharing.batches(length)

    def _sharing(self) -> Sharing:
        sharing = Sharing.of_batches(
            self.batch_size if self.shares_samples else None,
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.drop_last,
            self._even_batches,
        )
        return replace(
            sharing,
            ranks=tuple(range(self.num_processes)) if self._reads_for_all else sharing.ranks,
            fill=self._even_batches and self._evened > 1,
            trims=self._trims,
        )

    def _computed(self, order: ComputedOrder, sample_at: Callable[[Any], Any], position: int) -> Iterator[Any]:
        """Yield batches of samples whose positions are computed, many at once and only those of `sharing.ranks`."""
        sharing, total = self.sharing, order.length()
        size, share = sharing.round_size, sharing.share
        offsets = np.concatenate([np.arange(rank * share, (rank + 1) * share) for rank in sharing.ranks])
        at_once = max(1, _CHUNK // len(offsets)) * size
        whole = position + max(0, total - position) // size * size
        for start in range(position, whole, at_once):
            rounds = np.arange(start, min(start + at_once, whole), size)
            samples: list[int] = sample_at((rounds[:, None] + offsets).ravel()).tolist()
            for first in range(0, len(samples), share):
                yield samples[first : first + share] if self.shares_samples else samples[first]
        if sharing.tail_batches(max(0, total - whole)):
            positions = np.arange(whole, total)
            rest = len(positions)
            if sharing.fill:
                positions = np.concatenate([positions, np.arange(size - rest) % total])
            for _, part in sharing.parts(sample_at(positions).tolist(), rest):
                yield part if self.shares_samples else part[0]

    def _replayed(self, start: Callable[[], Replay], position: int, ending: Ending) -> Iterator[Any]:
        """Yield batches of a sampler that has to be drawn from its start."""
        # Not earlier, since torch makes two iterators for a pass with workers and reads only one of them.
        units = start()
        if self.cuts_batches:
            yield from self._cut(units, position, ending)
            return
        size = self.sharing.round_size

        def draw() -> list[Any]:
            return self._noted(units.draw(size), ending)

        rounds = deal(draw, lambda: units.opening, self.sharing, position, ending)
        for _, part, _ in rounds:
            yield part if self.shares_samples else part[0]

    def _noted(self, units: list[Any], ending: Ending) -> list[Any]:
        """Note how many samples whole batches hold, for those who count them."""
        if ending.sizes is not None:
            size = self.sharing.round_size
            for first in range(0, len(units), size):
                ending.sizes.append([length_of(unit) for unit in units[first : first + size]])
        return units

    def _listed(
        self, order: ReplayedOrder, start: Callable[[], Replay], position: int, ending: Ending
    ) -> Iterator[Any]:
        """Yield batches of a sampler of torch, which is drawn no further than torch draws it."""
        units = start()
        sharing, size, share = self.sharing, self.sharing.round_size, self.sharing.share
        offsets = [rank * share for rank in sharing.ranks]
        at_once = size if order.draws_on_the_way else _MANY // size * size + size
        whole_rounds = max(0, (order.length() or 0) - position) // size * size
        # Not to the end at once, where torch draws again.
        while drawn := self._noted(units.draw(min(at_once, whole_rounds) or size), ending):
            whole = len(drawn) // size * size
            whole_rounds -= whole
            for first in range(0, whole, size):
                for offset in offsets:
                    place = first + offset
                    yield drawn[place : place + share] if self.shares_samples else drawn[place]
            rest = drawn[whole:]
            if sharing.tail_batches(len(rest)):
                filled = completed(rest, units.opening, size) if sharing.fill else rest
                for _, part in sharing.parts(filled, len(rest)):
                    yield part if self.shares_samples else part[0]

    def _sharing_of(self, batch: Any) -> Sharing:
        """Return how the samples of a ready batch are divided."""
        return replace(self.sharing, share=-(-len(batch) // self.num_processes), drop_last=False)

    def _cut(self, units: Replay, position: int, ending: Ending) -> Iterator[Any]:
        """Yield slices of ready batches; each batch is a round."""
        batches, upcoming = 0, units.draw(2)
        while upcoming:
            batch, upcoming = upcoming[0], [*upcoming[1:], *units.draw(1)]
            # A batch that does not divide evenly is allowed only at the end.
            sharing = self._sharing_of(batch)
            if not upcoming:
                ending.foresee(sharing, batches, 0, len(batch))
            elif len(batch) % self.num_processes:
                raise ConfigurationError(
                    f"split_batches=True: batch {position} of {type(self.batch_sampler).__name__} has {len(batch)} "
                    f"samples, which do not split into {self.num_processes} equal parts. Only the last batch may have "
                    "another size; or set split_batches=False."
                )
            position += 1
            batches += len(sharing.ranks)
            if len(upcoming) == 1:  # the last one, which may have too few samples for this rank to get any
                ending.foresee(self._sharing_of(upcoming[0]), batches, 0, len(upcoming[0]))
            ending.over = None if len(upcoming) > 1 else position + len(upcoming)
            rest = len(batch)
            if ending.sizes is not None:
                ending.sizes.append([sharing.real(rest, rank) for rank in range(self.num_processes)])
            if sharing.fill:
                batch = completed(list(batch), list(units.opening[0]), sharing.round_size)
            for _, part in sharing.parts(batch, rest):
                yield part


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, also if it is inside a batch sampler.

    Example:
        >>> type(get_sampler(DataLoader(range(3), shuffle=True))).__name__
        'RandomSampler'
    """
    source = getattr(dataloader, index_source(dataloader))
    if isinstance(source, BatchSamplerShard):
        source = source.batch_sampler
    is_single = dataloader.batch_sampler is None and not isinstance(source, BatchSampler)
    return source if is_single else getattr(source, "sampler", None)


def index_source(loader: DataLoader[Any]) -> str:
    """Return the name of the loader's attribute that yields what to read."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
