"""This file is the loader that the first process reads for all, and sends each its batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.order.batch_slicing import Slicing
from trainer_lib.data_loader.order.loader_position import Pass, Place
from trainer_lib.data_loader.order.rank_rounds import Counted, Ending
from trainer_lib.data_loader.prepared_loader import Delivery, PreparedLoader
from trainer_lib.data_loader.readers.shard_reader import Reader
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows


class Parcel(NamedTuple):
    """What the first process sends another one: a batch, if it has one, and what is known of the end."""

    holds_batch: bool
    batch: Any
    rows: Rows | None
    remainder: int
    is_last: bool  # for the one who gets it
    is_end: bool  # for everybody: nothing is sent after it
    over: int | None


class DataLoaderDispatcher(PreparedLoader):
    """A loader that the first process reads for all: each is sent the batch that it would have read itself.

    For data that only one process can read. Batches travel as objects, so they may hold anything in any shape.
    """

    _group: ProcessGroup
    _slicing: Slicing | None

    @classmethod
    def around(
        cls, reader: Reader, delivery: Delivery, seed: int, group: ProcessGroup, slicing: Slicing | None = None
    ) -> "DataLoaderDispatcher":
        """Return the loader for a reader of a user's loader.

        Args:
            reader: Reads, on the first process, the batches of all processes one after the other.
            delivery: How batches get to the user.
            seed: The seed of the order.
            group: The processes.
            slicing: How to cut what the reader reads, if that is batches for all.
        """
        loader = object.__new__(cls)
        loader._set_up(reader, delivery, seed, group.size)
        loader._group, loader._slicing = group, slicing
        return loader

    def _samples_from(self, reading: Pass, start: int, rows: Rows | None) -> list[Any] | None:
        rank, cut = self._group.rank, self._slicing
        if cut is None:
            return self._reader.samples(self._seed, reading.epoch, start, rank, rows)
        of_all = self._reader.samples(self._seed, reading.epoch, start, 0, None)
        if of_all is None:
            return None
        share = (cut.batch_size or len(of_all)) // cut.processes
        return of_all[rank * share : rank * share + (share if rows is None else rows.real)]

    def trim_repeats(self) -> None:
        """Do nothing where the first rank cuts whole batches, since the cut needs all rows."""
        if self._slicing is None:
            super().trim_repeats()

    def leave_out_bad_samples(self, quarantine: Quarantine) -> None:
        """Raise: the others are sent batches, and not told what is missing in them."""
        raise UnsupportedError(
            "Samples that cannot be read cannot be left out with dispatch_batches=True. Leave one of the two out."
        )

    def _read(self, place: Place, ending: Ending) -> Iterator[Any]:
        rounds = self._rounds(place) if self._group.rank == 0 else None
        received, is_end = 0, False
        while not is_end:
            parcel = self._next_parcel(rounds)
            is_end = parcel.is_end
            received += parcel.holds_batch
            ending.over, ending.remainder = parcel.over, parcel.remainder
            if parcel.is_last:
                ending.batches = received
            if parcel.holds_batch:
                yield parcel.batch if parcel.rows is None else Counted(parcel.batch, parcel.rows, parcel.remainder)

    def _next_parcel(self, rounds: Iterator[list[Parcel]] | None) -> Parcel:
        """Return this rank's parcel of the next round; an error of the first rank is raised on all."""
        error = HeldError("Reading the next batches for all ranks")
        if rounds is None:
            parcel = self._group.scatter_objects(None)
        else:
            parcel = None
            with error.held():  # an object that cannot be sent raises before anything is sent
                parcel = self._group.scatter_objects(next(rounds))
            if error.report is not None:  # the other ranks wait for their batches
                parcel = self._group.scatter_objects([error.report] * self._group.size)
        if not isinstance(parcel, Parcel):  # the error report of the first rank
            error.raise_first([parcel])
        return parcel

    def _rounds(self, place: Place) -> Iterator[list[Parcel]]:
        """Yield what each process gets, round by round."""
        ending, own, read, left = Ending(), Ending(), 0, None
        if self._slicing is None:
            batches = self._reader.open(place, self._seed, ending)
        else:
            batches = self._slicing.slices(self._reader.open(place, self._seed, own), own, ending)
        while left != 0:
            round_ = list(islice(batches, self._group.size))
            read += len(round_)
            if len(round_) < self._group.size:
                ending.batches = read
            left = None if ending.batches is None else ending.batches - read
            yield [self._parcel(rank, round_, left, ending) for rank in range(self._group.size)]

    def _parcel(self, rank: int, round_: list[Any], left: int | None, ending: Ending) -> Parcel:
        holds_batch = rank < len(round_)
        batch, rows, remainder = round_[rank] if holds_batch else None, None, ending.remainder
        if type(batch) is Counted:
            batch, rows, remainder = batch
        elif left == 0 and holds_batch:
            rows = self._reader.rows_of(batch, ending.rows.get(rank))
        return Parcel(
            holds_batch, batch, rows, remainder,
            # Of what is left, the first processes get a batch each.
            is_last=left is not None and left <= rank,
            is_end=left == 0,
            over=ending.over,
        )  # fmt: skip
