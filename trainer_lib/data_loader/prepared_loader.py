"""This file is what prepared loaders have in common: the face of the user's loader, a position, a loop over batches."""

import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer_lib.data_loader.bad_samples.error_notes import add_notes, dead_workers, iterator_in
from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.order.loader_position import Pass, Place, Progress
from trainer_lib.data_loader.order.rank_rounds import Counted, Ending
from trainer_lib.data_loader.readers.shard_reader import Reader
from trainer_lib.foundation.errors import StateError, TrainerLibError
from trainer_lib.foundation.pytree import send_to_device
from trainer_lib.options.enums import RNGType
from trainer_lib.state.gradient_state import GradientState, Rows


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How batches get to the user.

    Args:
        device: Where to; `None`: they stay where they are.
        non_blocking: Do not wait for the copy.
        rng_types: The generators to synchronize between the processes at the start of a pass.
        generator: What "generator" stands for among them.
    """

    device: torch.device | str | int | None = None
    non_blocking: bool = False
    rng_types: tuple[str | RNGType, ...] = ()
    generator: torch.Generator | None = None


class PreparedLoader(DataLoader[Any]):
    """A user's loader, read by several processes: each gets its share, on its device.

    Attributes and methods of the user's loader are reached through it. Not made by hand, but by `prepare_data_loader`.
    """

    _is_accelerate_prepared = True

    # What `__setattr__` keeps here; everything else is the loader's.
    _OWN = frozenset(
        {"end_of_dataloader", "others_read_on", "remainder", "rows", "samples_in_round", "even_batches", "quarantine"}
    )

    end_of_dataloader: bool
    others_read_on: bool
    remainder: int
    rows: Rows | None
    samples_in_round: int | None  # of all ranks, without repeats; None: a rank cannot know those of the others
    quarantine: Quarantine | None
    _reader: Reader
    _progress: Progress

    def _set_up(self, reader: Reader, delivery: Delivery, seed: int, processes: int) -> None:
        """Do what `__init__` would; torch's would want to build a loader of its own."""
        self._reader, self._delivery, self._seed, self._processes = reader, delivery, seed, processes
        self._progress = Progress()
        self._skip_batches = 0
        self._skip_is_due = False
        self.end_of_dataloader, self.remainder, self.rows = False, -1, None
        self.others_read_on = False
        self.samples_in_round = None
        self.quarantine = None

    @abstractmethod
    def _read(self, place: Place, ending: Ending) -> Iterator[Any]:
        """Yield this process's batches from `place` on, and tell `ending` the end before the last one."""
        raise NotImplementedError

    # -- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        place = self._starting_place()
        reading, ending = self._progress.begin(place, self._reader.bookmark_before), Ending()
        before = self.end_of_dataloader, self.others_read_on, self.remainder, self.rows
        GradientState()._add_dataloader(self)
        try:
            self._synchronize_generators(place)
            batches = self._read(place, ending)
            self.end_of_dataloader, self.others_read_on = False, False
            self.remainder, self.rows = ending.remainder, None
            yield from self._delivered(batches, reading, ending)
            reading.finished = True
        except Exception as error:
            self._explain(error)
            self._reader.end_workers()
            raise
        finally:
            # Also when the loop is left by break or an exception, which closes this generator.
            GradientState()._remove_dataloader(self)
            self._progress.leave()
            self.end_of_dataloader, self.others_read_on, self.remainder, self.rows = before

    def _delivered(self, batches: Iterator[Any], reading: Pass, ending: Ending) -> Iterator[Any]:
        progress, step, clock = self._progress, self._reader.step, time.perf_counter
        device, non_blocking = self._delivery.device, self._delivery.non_blocking
        of_round = self.samples_in_round = self._reader.total_batch_size if self._reader.counts_alike else None
        counted = False
        asked = clock()
        for handed_out, batch in enumerate(batches, 1):
            if type(batch) is Counted:
                batch, self.rows, self.remainder = batch
                self._count_round(of_round)
                counted = True
            elif counted:
                self.rows, self.remainder, self.samples_in_round = None, ending.remainder, of_round
                counted = False
            if device is not None:
                batch = send_to_device(batch, device, non_blocking)
            reading.consumed += step
            progress.now = reading
            if handed_out == ending.batches:
                self._reach_end(batch, reading, ending)
            progress.waited += clock() - asked
            yield batch
            asked = clock()

    def _reach_end(self, batch: Any, reading: Pass, ending: Ending) -> None:
        """Note that the batch about to be handed out is the last."""
        self.end_of_dataloader = True
        # Where the processes have different numbers of batches, others may not be through.
        self.others_read_on = ending.over is not None and reading.consumed < ending.over
        reading.finished = not self.others_read_on
        if self._reader.unit == "samples":
            self.remainder = max(self.remainder, ending.remainder)
            self._count_round(self.samples_in_round)
        if self.rows is None:
            self.rows = self._reader.rows_of(batch, ending.rows.get(self._reader.rank))

    def _count_round(self, whole: int | None) -> None:
        self.samples_in_round = self.remainder if whole is not None and self.remainder > 0 else whole

    def _starting_place(self) -> Place:
        place = self._progress.following
        self._skip_batches = self._skip_batches if self._skip_is_due else 0
        self._skip_is_due = False
        return Place(place.epoch, self._skip_batches * self._reader.step) if self._skip_batches else place

    def _synchronize_generators(self, place: Place) -> None:
        # In the middle of a pass the generators are those of a checkpoint.
        if self._delivery.rng_types and not place.consumed:
            from trainer_lib.seeding import synchronize_rng_states

            synchronize_rng_states(self._delivery.rng_types, self._delivery.generator)

    def sample_ids(self) -> list[Any] | None:
        """Return which samples this process's batch in hand holds, row by row, without those that repeat others.

        Of a map-style dataset they are its indices, of an iterable one the places in what the pass gives. They are
        worked out from the order when they are asked for. `None` where that cannot be: nothing is being read, or the
        loader's class, its workers or its sampler have an order of their own that is not seen a second time.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
            >>> [loader.sample_ids() for _ in loader]
            [[2, 3], []]
        """
        samples = self._samples_ahead(0, self.rows)
        kept = None if self.quarantine is None else self.quarantine.kept
        return samples if samples is None or kept is None else [samples[at] for at in kept if at < len(samples)]

    @property
    def seeds_samples(self) -> bool:
        """Whether the generators are seeded before each sample, so that what samples draw depends on nothing else."""
        return self._reader.seeds_samples

    @property
    def may_draw_in_workers(self) -> bool:
        """Whether what samples draw at random goes by the workers: then it is not the same after a resume mid-pass."""
        return self._reader.style == "map" and bool(self._reader.loader.num_workers) and not self.seeds_samples

    @property
    def reads_alike(self) -> bool:
        """Whether every process reads the same stream, of which it keeps its part."""
        return self._reader.reads_alike

    @property
    def opening_digest(self) -> int | None:
        """The digest of the samples that the stream being read began with, once the first batch is there."""
        return self._reader.opening_digest

    def first_samples(self) -> list[Any] | None:
        """Return which samples the first process reads first, as this one sees it; see `sample_ids`."""
        return self._reader.samples(self._seed, 0, 0, 0, None)

    def leave_out_bad_samples(self, quarantine: Quarantine) -> None:
        """From the next pass on, leave out samples that cannot be read, and note them in `quarantine`.

        A batch has fewer rows then; one of which nothing is left has a sample in its place that `rows` does not count.

        Raises:
            UnsupportedError: Of an iterable dataset, of a loader that iterates in a way of its own, and where the first
                process reads for all.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> from trainer_lib.process_group import LoneProcess
            >>> texts = {0: "a cat", 1: "a dog", 3: "a cow"}
            >>> loader = DataLoader(texts, batch_sampler=[[0, 1], [2, 3]], collate_fn=list)
            >>> loader, quarantine = prepare_data_loader(loader, num_processes=1), Quarantine(LoneProcess(), 10, "most")
            >>> loader.leave_out_bad_samples(quarantine)
            >>> list(loader), [entry.index for entry in quarantine.agree()]
            ([['a cat', 'a dog'], ['a cow']], [2])
        """
        self._reader.leave_out(quarantine)
        self.quarantine = quarantine

    def keep_last(self) -> None:
        """Read a last batch that is not full, whatever the loader's `drop_last` says.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2, drop_last=True), num_processes=1)
            >>> loader.keep_last()
            >>> [batch.tolist() for batch in loader]
            [[0, 1], [2, 3], [4]]
        """
        self._reader.keep_last()

    def trim_repeats(self) -> None:
        """Read repeated samples no further than a rank needs them to take part in a round without samples of its own.

        For a caller that gives repeated samples no weight: no rows have to be cut from a batch, whatever `collate_fn`
        makes of its samples. Batches that come ready are repeated as they are.

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
        """Note on an error which workers died and what they had to read, if any did: torch raises it at any moment."""
        started = self._reader.read_by
        iterator = iterator_in(error) if started is None else started
        dead = dead_workers(iterator, self._samples_ahead, self._reader.read_ahead)
        for note in dead:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        return bool(dead)

    def _explain(self, error: Exception) -> None:
        """Note on an error which samples were being read when it was raised."""
        try:
            if not self.name_dead_workers(error) and not isinstance(error, TrainerLibError):
                add_notes(error, self._samples_ahead, self._reader.read_by, self._reader.read_ahead)
        except Exception:  # noqa: BLE001 - the sampler itself may be what raises
            return

    def _samples_ahead(self, batches: int, rows: Rows | None = None) -> list[Any] | None:
        """Return the samples of the batch that is so many batches after the one in hand."""
        now, step = self._progress.now, self._reader.step
        return None if now is None else self._samples_from(now, now.consumed + (batches - 1) * step, rows)

    def _samples_from(self, reading: Pass, start: int, rows: Rows | None) -> list[Any] | None:
        """Return the samples of this process's batch in the round that begins at `start`."""
        return self._reader.samples(self._seed, reading.epoch, start, self._reader.rank, rows)

    @property
    def seconds_waited(self) -> float:
        """How long those who read this loader waited for batches, over all passes."""
        return self._progress.waited

    # -- position ------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, and tell the samplers and the dataset if they want to know.

        Without it each pass is an epoch further on. A position inside `epoch` from `load_state_dict` stays.
        """
        self._progress.set_epoch(epoch)
        self._reader.set_epoch(epoch)

    def end_pass(self) -> None:
        """Count the pass being read as read to its end: a position saved from now on is that of the next pass.

        Example:
            >>> from trainer_lib.data_loader import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(4)), num_processes=1)
            >>> for _ in loader:
            ...     loader.end_pass()
            ...     break
            >>> loader.state_dict()["epoch"], loader.state_dict()["position"]
            (1, 0)
        """
        if self._progress.now is not None:
            self._progress.now.finished = True

    def rewind(self) -> None:
        """Have the next pass be the first one, from its beginning."""
        self._progress.go_to(Place())
        self._reader.set_epoch(0)

    def state_dict(self) -> dict[str, Any]:
        """Return where reading is: the pass, and the samples that all processes have been handed of it.

        It is a state to go on from in another world too, and consists of numbers and texts (but for what an iterable
        dataset's own `state_dict` may hold).
        """
        place = self._progress.where()
        position = {"epoch": place.epoch, "position": place.consumed, "seed": self._seed}
        return {**position, **self._reader.facts(), "bookmark": place.bookmark}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next pass start where `state_dict` was, in the order it was in.

        Raises:
            StateError: If the state does not fit the loader.
        """
        for name in ("style", "unit"):
            given, here = state_dict.get(name), getattr(self._reader, name)
            if given is not None and given != here:
                raise StateError(f"This state is of a loader of {name} {given!r}, and this one is of {name} {here!r}.")
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise StateError(
                f"This is no state of a prepared loader: {', '.join(missing)} is missing. Give what its state_dict() "
                "returned."
            )
        self._reader.check(state_dict)
        self._seed = state_dict["seed"]
        self._progress.go_to(Place(state_dict["epoch"], state_dict["position"], state_dict["bookmark"]))

    def starting_at(self, num_batches: int) -> "PreparedLoader":
        """Return a loader whose next pass starts `num_batches` in; it shares the count of passes with this one."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._reader = self._reader.duplicate()
        other._skip_batches, other._skip_is_due = num_batches, True
        return other

    # -- the face of a loader ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        loader = self._reader.loader
        own_way = type(loader).__len__ is not DataLoader.__len__
        return max(0, (len(loader) if own_way else self._reader.length()) - self._skip_batches)

    @property
    def batches_left(self) -> int:
        """The batches that this process still reads of the pass it is in; all of them between two passes."""
        behind = self._progress.where().consumed
        if type(self._reader.loader).__len__ is not DataLoader.__len__:
            return max(0, len(self) - behind // self._reader.step)
        return self._reader.length(behind)

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a round over all processes; `None` where that is not known."""
        return self._reader.total_batch_size

    @property
    def samples_in_batch(self) -> int | None:
        """The samples that the batch in hand is made of on this rank, without repeats; `None`: none, or not known."""
        of_round = self._reader.total_batch_size
        if self.rows is not None:
            return self.rows.real or None
        return None if of_round is None else of_round // self._processes

    @property
    def total_dataset_length(self) -> int:
        """The samples of the dataset, over all processes."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled, so that all processes have as many batches."""
        return self._reader.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self._reader.even_batches = even_batches

    @property
    def knows_end_of_all(self) -> bool:
        """Whether this process knows, with its last batch, if the others have more."""
        return self._reader.knows_end_of_all

    def get_sampler(self) -> Any:
        """Return the sampler."""
        from trainer_lib.data_loader.prepare import get_sampler

        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        self._reader.set_sampler(sampler)

    def __getattr__(self, name: str) -> Any:
        """Return what else the user's loader has."""
        if name == "_reader":  # not there yet while unpickling
            raise AttributeError(name)
        return self._reader.attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not this object's own on the loader inside."""
        if name.startswith("_") or name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            self._reader.set_attribute(name, value)

    def __repr__(self) -> str:
        """Return the loader inside, and whose share this reads."""
        return f"{type(self).__name__}({self._reader.loader!r}, process {self._reader.rank} of {self._processes})"
