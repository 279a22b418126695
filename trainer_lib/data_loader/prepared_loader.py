"""The base of prepared loaders: the interface of the user's loader, its position, and the loop over batches."""

import itertools
import math
import operator
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from trainer_lib.collectives.agreement import broadcast_noticed
from trainer_lib.data_loader.bad_samples.error_notes import (
    add_note_on_start,
    add_notes,
    dead_workers,
    is_from_start,
    iterator_in,
)
from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.build_reader import RankSplit
from trainer_lib.data_loader.order.batch_sampler_shard import get_sampler
from trainer_lib.data_loader.order.batch_slicing import Slicing
from trainer_lib.data_loader.order.epoch_start import EpochStart
from trainer_lib.data_loader.order.loader_position import LoaderPosition, Pass, Progress
from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending
from trainer_lib.data_loader.readers.reader import Reader
from trainer_lib.data_loader.state_mixin import DataLoaderStateMixin
from trainer_lib.foundation.errors import StateError, TrainerLibError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import send_to_device
from trainer_lib.logging import get_logger
from trainer_lib.options.enums import RNGType
from trainer_lib.state.gradient_state import GradientState, Rows

_logger = get_logger(__name__)
_LATER_ENTRIES = ("low_memory_shuffle", "start", "sample_generators")  # that states of earlier versions do not have


@frozen_dataclass(kw_only=True, eq=False)
class Delivery:
    """How batches are delivered to the user.

    Args:
        device: Where batches are moved to; `None`: they are not moved.
        non_blocking: Do not wait for the copy.
        rng_types: The generators to synchronize between the ranks at the start of a pass.
        generator: The generator that "generator" means in `rng_types`.
    """

    device: torch.device | str | int | None = None
    non_blocking: bool = False
    rng_types: tuple[str | RNGType, ...] = ()
    generator: torch.Generator | None = None


class PreparedLoader(DataLoaderStateMixin, DataLoader[Any]):
    """A user's loader, read by several ranks: each gets its share, on its device.

    It has the attributes and methods of the user's loader. `prepare_data_loader` makes it.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader: bool = False  # whether it is an instance of torchdata's `StatefulDataLoader`

    # Attributes that `__setattr__` sets here; all others are set on the user's loader.
    _LOCAL_ATTRIBUTES = frozenset(
        {
            "end_of_dataloader",
            "others_read_on",
            "remainder",
            "rows",
            "samples_in_round",
            "even_batches",
            "quarantine",
            "compares_openings",
        }
    )

    compares_openings: bool = True  # whether to warn if the first stream of a rank begins with other samples
    samples_in_round: int | None  # of all ranks, without repeats; None: unknown to a single rank
    quarantine: Quarantine | None
    _reader: Reader
    _progress: Progress

    @classmethod
    def around(cls, source: tuple[Reader, Slicing | None], split: RankSplit, delivery: Delivery, seed: int) -> Self:
        """Return the loader for a reader of a user's loader; torch's `__init__` would build another loader.

        Args:
            source: Reads the batches; and how they are cut for the other ranks, if they are.
            split: The ranks that share the batches.
            delivery: How batches are delivered to the user.
            seed: The seed of an order that is a function of seed and epoch.
        """
        loader = object.__new__(cls)
        loader.set_up(source, split, delivery, seed)
        return loader

    def set_up(self, source: tuple[Reader, Slicing | None], split: RankSplit, delivery: Delivery, seed: int) -> None:
        """Initialize; see `around`."""
        self._reader, self._delivery, self._seed, self._processes = source[0], delivery, seed, split.processes
        self._progress, self._world = Progress(), split.own_world
        self._skip_batches = 0
        self._skip_is_due = False
        self.reset()
        self.samples_in_round = None
        self.quarantine = None

    def begin_at(self, iteration: int, skip_batches: int) -> None:
        """Make the next pass the epoch `iteration`, without its first `skip_batches` batches."""
        self._progress.set_epoch(iteration)
        self._skip_batches, self._skip_is_due = skip_batches, True

    @abstractmethod
    def _read(self, place: LoaderPosition, ending: Ending) -> Iterator[Any]:
        """Yield this rank's batches from `place` on, and fill in `ending` before the last one."""
        raise NotImplementedError

    # -- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        place = self._starting_place()
        self._synchronize_generators(place)
        # Before a sampler is iterated, which may list its order then, and after which its generators may be others.
        self._reader.set_epoch(place.epoch)
        place = replace(place, start=self._agreed_start(place.start))
        reading, ending = self._progress.begin(place, self._reader.bookmark_before), Ending()
        before = self.end_of_dataloader, self.others_read_on, self.remainder, self.rows
        # A script may hold its iterator until Python ends: nothing is left to restore then, and no global can be read.
        is_finalizing = sys.is_finalizing
        GradientState().add_dataloader(self)
        try:
            batches = self._read(place, ending)
            self.end_of_dataloader, self.others_read_on = False, False
            self.remainder, self.rows = self._remainder(ending), None
            if self.compares_openings and self._reader.reads_alike and self._reader.agrees_on_start:
                batches = self._compared(batches)
            yield from self._delivered(batches, reading, ending)
            reading.finished = True
        except GeneratorExit:  # the loop is left
            if not reading.finished and not is_finalizing():
                self._reader.leave(self._seed, reading)
            raise
        except Exception as error:
            self._explain(error)
            self._reader.end_workers()
            raise
        finally:
            # Also if a break or an exception ends the loop, which closes this generator.
            if not is_finalizing():
                GradientState().remove_dataloader(self)
                self._progress.leave()
                self._reader.check_read(reading)
                self.end_of_dataloader, self.others_read_on, self.remainder, self.rows = before

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; after the first one, warn if this rank reads other samples than another one."""
        store = self._world.store("openings")
        # All ranks begin these passes together, so they count them alike.
        self.compares_openings, number = False, store.add(f"times/{self._world.rank}", 1)
        for batch in itertools.islice(batches, 1):
            if (digest := self._reader.opening_digest) is not None:
                # Without waiting for other ranks: the first rank to get here leaves its digest for the others.
                left = store.compare_set(f"{number}", "", f"{digest} of {self._world.rank}").decode()
                self._compare_opening(f"{digest}", *left.split(" of "))
            yield batch
        yield from batches

    def _compare_opening(self, digest: str, first: str, rank: str) -> None:
        if digest != first:
            _logger.warning(
                "Rank %d reads other samples of %s than rank %s. Each rank keeps only its part of what it reads, so "
                "samples are missed or repeated. If the dataset already yields different samples on each rank, set its "
                "attribute is_split_between_processes = True before prepare. If its samples are random, seed them "
                "alike on all ranks.",
                *(self._world.rank, type(self._reader.attribute("dataset")).__name__, rank),
                main_process_only=False,
            )

    def _delivered(self, batches: Iterator[Any], reading: Pass, ending: Ending) -> Iterator[Any]:
        progress, step, clock = self._progress, self._reader.step, time.perf_counter
        device, non_blocking = self._delivery.device, self._delivery.non_blocking
        send = None if device is None else _sender(device)
        of_round = self.samples_in_round = self._reader.total_batch_size if self._reader.counts_alike else None
        counted = False
        asked = clock()
        for handed_out, batch in enumerate(batches, 1):
            if type(batch) is Counted:
                batch, self.rows, self.remainder = batch
                self._count_round(of_round)
                counted = True
            elif counted:
                self.rows, self.remainder, self.samples_in_round = None, self._remainder(ending), of_round
                counted = False
            if send is not None:
                batch = send(batch, device, non_blocking)
            reading.consumed += step
            progress.now = reading
            if handed_out == ending.batches:
                self._reach_end(batch, reading, ending)
            progress.waited += clock() - asked
            yield batch
            asked = clock()

    def _reach_end(self, batch: Any, reading: Pass, ending: Ending) -> None:
        """Record that the batch about to be delivered is the last."""
        self.end_of_dataloader: bool = True
        # Where ranks have different numbers of batches, other ranks may have more.
        self.others_read_on: bool = ending.over is not None and reading.consumed < ending.over
        reading.finished = not self.others_read_on
        if self._reader.unit == "samples":
            self.remainder: int = max(self.remainder, ending.remainder)
            self._count_round(self.samples_in_round)
        if self.rows is None:
            self.rows = self._reader.rows_of(batch, ending.rows.get(self._reader.rank))

    def _remainder(self, ending: Ending) -> int:
        # What the end of a pass counts may be whole batches.
        return ending.remainder if self._reader.unit == "samples" else -1

    def _count_round(self, whole: int | None) -> None:
        self.samples_in_round = self.remainder if whole is not None and self.remainder > 0 else whole

    def _starting_place(self) -> LoaderPosition:
        place = self._progress.following
        self._skip_batches = self._skip_batches if self._skip_is_due else 0
        self._skip_is_due = False
        if not self._skip_batches:
            return place
        return LoaderPosition(place.epoch, self._skip_batches * self._reader.step, start=place.start)

    def _agreed_start(self, start: EpochStart | None) -> EpochStart | None:
        """Return the states that random generators start an epoch with: those of rank 0."""
        start = start or self._reader.epoch_start()
        if not self._reader.agrees_on_start:
            return start
        return broadcast_noticed(self._world, start, "a pass over a prepared loader")

    def _synchronize_generators(self, place: LoaderPosition) -> None:
        # In the middle of a pass the generators come from a checkpoint.
        if self._delivery.rng_types and not place.consumed:
            from trainer_lib.seeding import synchronize_rng_states

            synchronize_rng_states(self._delivery.rng_types, self._delivery.generator)

    def sample_ids(self) -> list[Any] | None:
        """Return the samples of this rank's current batch, row by row, without repeats.

        For a map-style dataset they are indices, for an iterable one positions in the pass. They are computed from the
        order on request. `None` if that is impossible: no batch is being read, or the loader's class, its workers or
        its sampler have an order that cannot be replayed.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
            >>> [loader.sample_ids() for _ in loader]
            [[2, 3], []]
        """
        samples = self._samples_ahead(0, self.rows)
        if samples is None:
            return None
        kept = None if self.quarantine is None else self.quarantine.kept
        samples = samples if kept is None else [samples[row] for row in kept if row < len(samples)]
        return [_plain_index(sample) for sample in samples]

    @property
    def seeds_samples(self) -> bool:
        """Whether the generators are seeded before each sample, so that its random numbers depend only on it."""
        return self._reader.seeds_samples

    @property
    def may_draw_in_workers(self) -> bool:
        """Whether workers may draw random numbers for samples, which then differ after a resume in mid-pass."""
        return self._reader.style == "map" and bool(self._reader.loader.num_workers) and not self.seeds_samples

    @property
    def reads_alike(self) -> bool:
        """Whether every rank reads the same stream and keeps its part."""
        return self._reader.reads_alike

    @property
    def opening_digest(self) -> int | None:
        """The digest of the first samples of the current stream, once the first batch was read."""
        return self._reader.opening_digest

    def first_samples(self) -> list[Any] | None:
        """Return the samples that rank 0 reads first, as computed on this rank; see `sample_ids`.

        All ranks have to call it.
        """
        start = self._agreed_start(None)
        return self._reader.samples(self._seed, LoaderPosition(start=start), 0, 0, None)

    def skip_bad_samples(self, quarantine: Quarantine) -> None:
        """From the next pass on, skip samples that cannot be read, and add them to `quarantine`.

        The batch then has fewer rows. If no row is left, it has a stand-in that `rows` does not count.

        Raises:
            UnsupportedError: For an iterable dataset, for a loader with an `__iter__` of its own, and where rank 0
                reads for all ranks.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> from trainer_lib.process_group import LoneProcess
            >>> texts = {0: "a cat", 1: "a dog", 3: "a cow"}
            >>> loader = DataLoader(texts, batch_sampler=[[0, 1], [2, 3]], collate_fn=list)
            >>> loader, quarantine = prepare_data_loader(loader, num_processes=1), Quarantine(LoneProcess(), 10, "most")
            >>> loader.skip_bad_samples(quarantine)
            >>> list(loader), [entry.index for entry in quarantine.sync_across_ranks()]
            ([['a cat', 'a dog'], ['a cow']], [2])
        """
        self._reader.skip_bad_samples(quarantine)
        self.quarantine = quarantine

    def keep_last(self) -> None:
        """Read an incomplete last batch, whatever the loader's `drop_last` is.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2, drop_last=True), num_processes=1)
            >>> loader.keep_last()
            >>> [batch.tolist() for batch in loader]
            [[0, 1], [2, 3], [4]]
        """
        self._reader.keep_last()

    def trim_repeats(self) -> None:
        """Read only as many repeated samples as a rank without samples of its own needs to take part in a round.

        For callers that give repeated samples no weight: no rows have to be cut from a batch, whatever `collate_fn`
        returns. Batches that the dataset makes are repeated as they are.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> data = DataLoader(range(5), batch_size=4)
            >>> for rank in range(2):
            ...     loader = prepare_data_loader(data, num_processes=2, process_index=rank)
            ...     loader.trim_repeats()
            ...     print([batch.tolist() for batch in loader])
            [[0, 1, 2, 3]]
            [[4]]
        """
        self._reader.trim_repeats()

    def name_dead_workers(self, error: Exception) -> bool:
        """Add notes to an error about workers that died and what they had to read; return whether any died."""
        started = self._reader.read_by
        iterator = iterator_in(error) if started is None else started
        is_cut_off = isinstance(error, (EOFError, ConnectionError))
        dead = dead_workers(iterator, self._samples_ahead, self._reader.read_ahead, is_cut_off)
        for note in dead:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        return bool(dead)

    def _explain(self, error: Exception) -> None:
        """Add notes to an error about the samples that were being read."""
        try:
            are_named = self.name_dead_workers(error)
            if is_from_start(error):
                add_note_on_start(error, self._reader.loader.multiprocessing_context)
            elif not are_named and not isinstance(error, TrainerLibError):
                add_notes(error, self._samples_ahead, self._reader.read_by, self._reader.read_ahead)
        except Exception:  # noqa: BLE001 - the sampler itself may raise
            return

    def _samples_ahead(self, batches: int, rows: Rows | None = None) -> list[Any] | None:
        """Return the samples of the batch that is so many batches after the current one."""
        now, step = self._progress.now, self._reader.step
        return None if now is None else self._samples_from(now, now.consumed + (batches - 1) * step, rows)

    def _samples_from(self, reading: Pass, start: int, rows: Rows | None) -> list[Any] | None:
        """Return the samples of this rank's batch in the round that begins at `start`."""
        return self._reader.samples(self._seed, reading, start, self._reader.rank, rows)

    @property
    def seconds_waited(self) -> float:
        """The seconds spent waiting for batches of this loader, over all passes."""
        return self._progress.waited

    # -- position ------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next pass, and call `set_epoch` of the samplers and the dataset if they have it.

        An order that is drawn from random generators does not depend on the number of the epoch. Without this call
        each pass is the next epoch. A position inside `epoch` from `load_state_dict` is kept.
        """
        self._progress.set_epoch(epoch)
        self._reader.set_epoch(epoch)

    def end_pass(self) -> None:
        """Count the current pass as finished: a position saved from now on is the start of the next pass.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(4)), num_processes=1)
            >>> for _ in loader:
            ...     loader.end_pass()
            ...     break
            >>> loader.state_dict()["epoch"], loader.state_dict()["position"]
            (1, 0)
        """
        now = self._progress.now
        if now is not None:
            now.is_cut, now.finished = not now.finished, True

    def rewind(self) -> None:
        """Make the next pass the first one, from its start and in its order."""
        self._progress.rewind()
        self._reader.set_epoch(0)

    def generators_kept(self) -> AbstractContextManager[None]:
        """Return a context after which the generators of the loader, its sampler and its dataset are as before.

        Those of workers are copies, which end with the workers.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> drawn = DataLoader(range(5), shuffle=True, generator=torch.Generator().manual_seed(0))
            >>> loader = prepare_data_loader(drawn, num_processes=1)
            >>> with loader.generators_kept():
            ...     first = torch.cat(list(loader))
            >>> torch.equal(first, torch.cat(list(loader)))
            True
        """
        return self._reader.generators_kept()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the pass, and how many of its samples were delivered to all ranks.

        You can resume from it with another world size. It consists of numbers and texts (except for the `state_dict`
        of an iterable dataset, which may hold anything). Inside an epoch whose order is drawn from random generators,
        it holds their states at the start of the epoch; between two epochs those of the loader's and the sampler's own.
        """
        place = self._progress.where()
        start = place.start
        if start is None or not place.consumed:
            seeds_workers = self._reader.seeds_workers if start is None else start.seeds_workers
            start = EpochStart(own=self._states_between(place), seeds_workers=seeds_workers)
        position = {"epoch": place.epoch, "position": place.consumed, "seed": self._seed}
        order = {"low_memory_shuffle": self._reader.low_memory, "start": start.state_dict()}
        samples = {"sample_generators": self._reader.sample_generators.states()}
        return {**position, **order, **samples, **self._reader.facts(), "bookmark": place.bookmark}

    @property
    def data_seed(self) -> int:
        """The seed of the order, and of each sample where samples are seeded."""
        return self._seed

    def state_at(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the `state_dict` after so many batches of an epoch."""
        state = self.state_dict()
        position = min(batches * self._reader.step, state.get("length") or math.inf)
        place = {"epoch": epoch, "position": int(position) if batches else 0, "bookmark": None}
        # The generators come from the checkpoint, with what the epoch had drawn at its start, if it had begun.
        start = EpochStart(own=self._reader.generator_states(), seeds_workers=not batches)
        return {**state, **place, "start": start.state_dict()}

    def _states_between(self, place: LoaderPosition) -> list[Any]:
        """Return the states with which the loader's own generators start the pass at `place`."""
        now = self._progress.now
        if place.start is not None:
            return place.start.own
        if now is not None and self._progress.at_last_batch and not self._reader.low_memory:
            return self._reader.generator_states_after(self._seed, now)
        return self._reader.generator_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next pass at the position in `state_dict`, in the same order.

        Raises:
            StateError: If the state does not fit the loader.
        """
        for name in ("style", "unit"):
            saved, current = state_dict.get(name), getattr(self._reader, name)
            if saved is not None and saved != current:
                raise StateError(
                    f"This state was saved by a loader with {name} {saved!r}, and this loader has {name} {current!r}. "
                    "Load it into a loader over the same kind of dataset."
                )
        missing = [name for name in self.state_dict() if name not in (*state_dict, *_LATER_ENTRIES)]
        if missing:
            raise StateError(
                f"This is not the state of a prepared loader: {', '.join(missing)} is missing. Pass what its "
                "state_dict() returned."
            )
        self._reader.check(state_dict)
        # States without this entry are of orders that are computed from seed and epoch.
        self._reader.use_low_memory(state_dict.get("low_memory_shuffle", True))
        self._seed = state_dict["seed"]
        held, samples = self._reader.sample_generators, state_dict.get("sample_generators", {})
        if isinstance(samples, list):  # earlier versions listed those of the dataset
            samples = dict(zip(held.by_path(), samples, strict=False))
        held.restore(samples)
        start, position = self._loaded_start(state_dict), state_dict["position"]
        if start is not None and not position:
            self._reader.continue_after(start)
            start = None
        self._progress.go_to(LoaderPosition(state_dict["epoch"], position, state_dict["bookmark"], start))

    def _loaded_start(self, state: dict[str, Any]) -> EpochStart | None:
        if self._reader.low_memory:
            return None
        start = EpochStart.from_state_dict(state["start"])
        is_older = not isinstance(state.get("sample_generators"), dict)  # it has not all generators of a dataset
        if is_older and self._reader.style == "iterable":
            start = replace(start, own=[*start.own, *self._reader.generator_states()[len(start.own) :]])
        saved, current = len(start.own), len(self._reader.generator_states())
        if saved != current:
            raise StateError(
                f"This state was saved by a loader with {saved} random generators (its own, its sampler's and its "
                f"iterable dataset's), and this loader has {current}: the order would differ. Pass a generator to the "
                "loader, its sampler and its dataset as before."
            )
        return start

    def starting_at(self, num_batches: int) -> "PreparedLoader":
        """Return a loader whose next pass skips `num_batches`; it shares the count of passes with this one."""
        if self._progress.following.consumed:
            self._reader.count_workers_as_living()  # the other loader resumes a pass that this one had begun
        other = object.__new__(type(self))
        skipping = {"_reader": self._reader.duplicate(), "_skip_batches": num_batches, "_skip_is_due": True}
        other.__dict__.update({**self.__dict__, **skipping})
        return other

    def continue_from(self, other: "PreparedLoader", keep_seed: bool = True) -> None:
        """Read next what another prepared loader around the same user's loader would read; they share their passes.

        Args:
            other: The other loader.
            keep_seed: Take its seed too, for an order that is a function of seed and epoch.
        """
        self._progress, self._skip_batches, self._skip_is_due = (
            other._progress,
            other._skip_batches,
            other._skip_is_due,
        )
        if keep_seed:
            self._seed = other._seed

    # -- the interface of a DataLoader ---------------------------------------------------------------------------

    def __len__(self) -> int:
        loader = self._reader.loader
        has_own_length = type(loader).__len__ is not DataLoader.__len__
        return max(0, (len(loader) if has_own_length else self._reader.length()) - self._skip_batches)

    @property
    def batches_left(self) -> int:
        """The batches that this rank still has to read in the current pass; all of them between two passes."""
        behind = self._progress.where().consumed
        if type(self._reader.loader).__len__ is not DataLoader.__len__:
            return max(0, len(self) - behind // self._reader.step)
        return self._reader.length(behind)

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all ranks; `None` if unknown."""
        return self._reader.total_batch_size

    @property
    def samples_in_batch(self) -> int | None:
        """The samples of the current batch on this rank, without repeats; `None` if there are none or unknown."""
        of_round = self._reader.total_batch_size
        if self.rows is not None:
            return self.rows.real or None
        return None if of_round is None else of_round // self._processes

    @property
    def total_dataset_length(self) -> int:
        """The samples of the dataset, over all ranks."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled, so that all ranks have the same number of batches."""
        return self._reader.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._reader.even_batches = even_batches

    @property
    def knows_end_of_all(self) -> bool:
        """Whether this rank knows, at its last batch, if the other ranks have more."""
        return self._reader.knows_end_of_all

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader that is read: a copy of the user's."""
        return self._reader.loader

    @property
    def device(self) -> torch.device | str | int | None:
        """Where batches are moved to; `None`: they are not moved."""
        return self._delivery.device

    @property
    def iteration(self) -> int:
        """The epoch of the next pass, or of the pass in which a loop was left."""
        return self._progress.where().epoch

    def get_sampler(self) -> Any:
        """Return the sampler."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        self._reader.set_sampler(sampler)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's loader."""
        if name == "_reader":  # not set yet while unpickling
            raise AttributeError(name)
        return self._reader.attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader inside, unless it is one of this class."""
        if name.startswith("_") or name in self._LOCAL_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            self._reader.set_attribute(name, value)

    def __repr__(self) -> str:
        """Return the loader inside, and the rank that reads it."""
        return f"{type(self).__name__}({self._reader.loader!r}, rank {self._reader.rank} of {self._processes})"


DataLoaderAdapter = PreparedLoader  # its name in Accelerate, which scripts ask for


def _plain_index(sample: Any) -> Any:
    """Return an index of numpy or torch, as many samplers yield them, as the integer that it is."""
    if type(sample) is int or not hasattr(sample, "__index__"):
        return sample
    try:
        return operator.index(sample)
    except TypeError:  # a tensor of another kind
        return sample


def _sender(device: torch.device | str | int) -> Callable[..., Any]:
    """Return what sends batches to a device; from an accelerator, what they were on the host can be asked for later."""
    if torch.device(device).type == "cpu":
        return send_to_device
    from trainer_lib.data_loader.host_values import send_remembered

    return send_remembered
