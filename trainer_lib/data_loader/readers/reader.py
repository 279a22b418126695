"""A copy of a user's loader, with its sampler (or dataset) replaced by the share of one rank.

Everything else of the loader is kept: its class, collate function, workers, pinned memory and attributes.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import torch
from torch.utils.data import DataLoader

from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.order.epoch_start import (
    EpochStart,
    EpochStream,
    generators_kept,
    set_state,
    started,
    state_of,
    unique,
)
from trainer_lib.data_loader.order.loader_position import LoaderPosition, Pass
from trainer_lib.data_loader.order.samples_per_rank import Ending, Sharing
from trainer_lib.data_loader.order.worker_seeds import WorkerSeeds, draw_unread, draw_worker_seed
from trainer_lib.data_loader.worker_process import WorkerInit, make_ready
from trainer_lib.foundation.errors import StateError, UnsupportedError
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.state.gradient_state import Rows

if TYPE_CHECKING:
    from trainer_lib.data_loader.order.held_generators import HeldGenerators


class Reader(ABC):
    """A copy of a user's loader that reads the share of a rank, from any position on.

    Args:
        loader: The user's loader, which does not change.
        rank: The rank.
    """

    style: str
    unit: str  # what positions count: "samples", or "batches" made by the dataset
    seeds_samples: bool = False
    low_memory: bool = False  # the order is computed from seed and epoch
    _had_workers: bool = False  # the loader whose state was loaded had workers that lived on

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader: DataLoader[Any] = copied(loader)
        self.rank = rank
        self._replaced: dict[str, Any] = {}
        self._read_by: ref[Any] | None = None
        self._worker_seeds = WorkerSeeds()
        self.swap("generator", self._worker_seeds.generator)
        self._worker_init = WorkerInit(loader.worker_init_fn)
        if loader.num_workers:
            make_ready(loader.multiprocessing_context)
        self.swap("worker_init_fn", self._worker_init)

    @property
    @abstractmethod
    def sharing(self) -> Sharing:
        """How units are divided between ranks."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The units that all ranks together read while this rank reads a batch."""

    @property
    @abstractmethod
    def deals_whole_batches(self) -> bool:
        """Whether a unit is a batch, delivered as it is."""

    @property
    @abstractmethod
    def total_batch_size(self) -> int | None:
        """The samples of a round over all ranks; `None` if unknown."""

    @property
    @abstractmethod
    def even_batches(self) -> bool:
        """Whether the last round is filled."""

    @even_batches.setter
    @abstractmethod
    def even_batches(self, even_batches: bool) -> None: ...

    @property
    def counts_alike(self) -> bool:
        """Whether every rank knows how many samples all ranks together read in a round."""
        return self.total_batch_size is not None

    def trim_repeats(self) -> None:  # noqa: B027 - nothing to do where samples are not divided one by one
        """Of samples repeated to make ranks even, read only the ones that a rank needs to take part."""

    @abstractmethod
    def keep_last(self) -> None:
        """Read an incomplete last round, whatever the loader's `drop_last` is."""

    @property
    def reads_alike(self) -> bool:
        """Whether every rank reads the same stream and keeps its part."""
        return False

    @property
    def opening_digest(self) -> int | None:
        """The digest of the first samples of the current stream; `None` if they were not read here."""
        return None

    @property
    def knows_end_of_all(self) -> bool:
        """Whether the end that `open` reports is that of all ranks."""
        return True

    @property
    def read_ahead(self) -> int:
        """How many batches the workers have delivered before the first one is handed out."""
        return 0

    @abstractmethod
    def open(self, place: LoaderPosition, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a position on, and fill in `ending` before the last one."""

    @abstractmethod
    def length(self, behind: int = 0) -> int:
        """Return how many batches the rank still reads in a pass after `behind` units."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's objects that have `set_epoch`."""

    @abstractmethod
    def read_for_all(self) -> None:
        """Read the batches of all ranks, one after the other."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the facts that a position depends on."""

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` is not valid for this loader."""

    # -- random generators -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def order_generators(self) -> list[Any]:
        """The generators that the user's sampler or dataset holds and the order follows from."""

    @property
    @abstractmethod
    def draws_from(self) -> tuple[str, ...]:
        """The global generators that the order may draw from, by name."""

    @property
    @abstractmethod
    def sample_generators(self) -> "HeldGenerators":
        """The generators that samples and batches draw from in this process."""

    @contextmanager
    def generators_kept(self) -> Generator[None]:
        """Restore the generators of the loader, its sampler, its dataset and its collate function after the block."""
        with generators_kept(self._generators), self.sample_generators.kept():
            yield

    @property
    def agrees_on_start(self) -> bool:
        """Whether all ranks have to start an epoch with the generators of rank 0."""
        return not self.low_memory and bool(self.order_generators or self.draws_from)

    def epoch_start(self) -> EpochStart | None:
        """Return the start of an epoch that begins now; `None` if the order is a function of seed and epoch."""
        if self.low_memory:
            return None
        workers = {"seeds_workers": self.seeds_workers, "has_workers": self.loader.num_workers > 0}
        self._had_workers = False
        return EpochStart.now(self._generators, self.draws_from, **workers)

    @property
    def seeds_workers(self) -> bool:
        """Whether torch draws a seed for workers at the start of the next epoch: not for those that still live."""
        live_on = self.loader.persistent_workers and self.loader.__dict__.get("_iterator") is not None
        return not (live_on or self._had_workers)

    def count_workers_as_living(self) -> None:
        """Draw no seed for workers at the start of the next epoch, if they are persistent."""
        self._had_workers = self.loader.persistent_workers

    def generator_states(self) -> list[Any]:
        """Return the states of the generators that the loader and its sampler hold."""
        return [] if self.low_memory else [state_of(generator) for generator in self._generators]

    def leave(self, seed: int, reading: Pass) -> None:
        """Give back what was drawn from generators for batches that a pass, left before its end, did not come to."""
        del seed, reading

    def check_read(self, reading: Pass) -> None:  # noqa: B027 - an index is never beyond the length
        """Warn if a pass, of which no more is read, was longer than the length of the dataset."""

    def generator_states_after(self, seed: int, reading: Pass) -> list[Any]:
        """Return the states that generators have when a pass is read to its end, whose last batch is in hand."""
        del seed, reading
        return self.generator_states()

    def continue_after(self, start: EpochStart) -> None:
        """Start the next epoch as the loader would have that saved this start between two epochs."""
        for generator, state in zip(self._generators, start.own, strict=True):
            set_state(generator, state)
        self._had_workers = not start.seeds_workers

    def use_low_memory(self, low_memory: bool) -> None:
        """Compute the order from seed and epoch, or do not."""
        self.low_memory = low_memory

    @property
    def users_generator(self) -> torch.Generator | None:
        """The generator of the user's loader."""
        generator = self.attribute("generator")
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def _generators(self) -> list[Any]:
        users = self.users_generator
        return unique([*([] if users is None else [users]), *self.order_generators])

    def _open_order(self, start: EpochStart, stream: EpochStream) -> torch.Tensor | None:
        """Draw what torch's iterator draws before it asks for a batch; see `ReplayedOrder.open`."""
        del start  # a dataset is iterated when a batch is asked for
        return draw_worker_seed(stream, self.users_generator)

    def _begin(self, place: LoaderPosition, seed: int, keys: tuple[int, ...], as_torch: bool) -> EpochStream | None:
        """Seed the workers, and return what samplers draw from in this epoch.

        Args:
            place: Where the epoch starts.
            seed: The seed of the loader.
            keys: What the seed of the workers depends on, besides seed and epoch.
            as_torch: Whether workers get the seed that torch draws for them.
        """
        self._worker_seeds.compute(seed, place.epoch, *keys)
        if place.start is None:
            return None
        place.start.restore(self._generators)
        stream = EpochStream(place.start)
        before = self._open_order(place.start, stream)
        if before is not None and as_torch:
            self._worker_seeds.take(before)
        return stream

    def leave_unread(self, place: LoaderPosition) -> None:
        """Draw from training's generators what torch draws at the start of an epoch, which another rank reads."""
        draw_unread(place.start, self.users_generator)

    @abstractmethod
    def samples(
        self, seed: int, reading: LoaderPosition | Pass, start: int, rank: int, rows: Rows | None
    ) -> list[Any] | None:
        """Return the samples of a rank's batch, without repeats; `None` if they are unknown.

        Args:
            seed: The seed of the order.
            reading: The pass.
            start: The position in the pass at which the batch's round begins.
            rank: The rank of the batch.
            rows: The counts of its rows, if known.
        """

    def skip_bad_samples(self, quarantine: Quarantine) -> None:
        """Skip samples that cannot be read, and add them to `quarantine`.

        Raises:
            UnsupportedError: If this loader cannot skip samples.
        """
        del quarantine
        if self.iterates_itself:
            reason = f"{type(self.loader).__name__} has an __iter__ of its own. Use a plain DataLoader"
        else:
            reason = "an iterable dataset ends when it raises. Catch the error in its __iter__"
        raise UnsupportedError(f"Bad samples cannot be skipped with this loader: {reason}.")

    def duplicate(self) -> Self:
        """Return another reader for the same loader."""
        other = copy.copy(self)
        other._replaced = dict(self._replaced)
        other.loader = copied(self.loader)
        other._worker_seeds = WorkerSeeds()
        other.swap("generator", other._worker_seeds.generator)
        return other

    def rows_of(self, batch: Any, rows: Rows | None) -> Rows | None:
        """Return the counts of a batch's rows; a batch that counts as one unit is a repeat as a whole."""
        if rows is None or not self.deals_whole_batches:
            return rows
        return Rows(ignorant_find_batch_size(batch) or 1, 0)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        raise UnsupportedError(
            f"set_sampler({type(sampler).__name__}): this loader has no sampler of single samples (it is {self.style}-"
            f"style and reads {self.unit}). Make a loader with that sampler instead."
        )

    def bookmark_before(self, position: int) -> Any:
        """Return the newest bookmark of the current pass before a position, or `None`."""
        del position

    def swap(self, name: str, value: Any) -> None:
        """Replace an attribute of the copy; the user still sees the old value."""
        self._replaced.setdefault(name, self.loader.__dict__.get(name))
        # Not setattr: torch forbids most of these.
        self.loader.__dict__[name] = value

    def attribute(self, name: str) -> Any:
        """Return an attribute of the loader as the user set it."""
        return self._replaced[name] if name in self._replaced else getattr(self.loader, name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        setattr(self.loader, name, value)

    def _iterated(self) -> Iterator[Any]:
        self._worker_init.note_thread()
        iterator = iter(self.loader)
        self._read_by = ref(iterator) if hasattr(iterator, "_workers") else None  # weakly: its workers end with it
        return started(iterator) if self.iterates_itself else iterator

    def end_workers(self) -> None:
        """End the workers after an error."""
        # The traceback keeps the workers alive, and the garbage collector would wait 5 s in vain for each of them.
        end = getattr(self.read_by, "_shutdown_workers", None)
        if end is not None and not self.loader.persistent_workers:
            end()

    @property
    def read_by(self) -> Any:
        """The iterator of torch whose workers read; `None` without workers."""
        return None if self._read_by is None else self._read_by()

    @property
    def iterates_itself(self) -> bool:
        """Whether the loader's class has its own `__iter__`."""
        return not type(self.loader).__iter__.__module__.startswith(("torch.utils.data", "torchdata."))

    def _check_length(self, state: dict[str, Any], length: int | None) -> None:
        if None not in (length, state["length"]) and length != state["length"]:
            raise StateError(
                f"This state was saved with {state['length']} {self.unit} per pass, and the loader has {length} now: "
                "the order would differ. Load the state into a loader of the same dataset. If limit_train_batches is "
                "set and the batch size changed, limit them to the same number of samples."
            )


def look_ahead(batches: Iterator[Any], ending: Ending, own: Ending | None = None, by: int = 1) -> Iterator[Any]:
    """Yield batches late, so that the end is known before the last ones are delivered.

    Args:
        batches: The batches.
        ending: Receives their number.
        own: Holds the rest of what is known of the end.
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


def copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a shallow copy of a loader, without its running workers."""
    duplicate = copy.copy(loader)
    duplicate.__dict__["_iterator"] = None
    return duplicate
