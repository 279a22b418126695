"""A loader that rank 0 reads for all ranks, and of which it sends each rank its batches."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.build_reader import RankSplit, check_preparable
from trainer_lib.data_loader.order.batch_slicing import Slicing
from trainer_lib.data_loader.order.data_rng import positive_seed
from trainer_lib.data_loader.order.loader_position import LoaderPosition, Pass
from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending
from trainer_lib.data_loader.prepared_loader import Delivery, PreparedLoader
from trainer_lib.data_loader.readers.reader import Reader
from trainer_lib.data_loader.stateful_loader import stateful_kind
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.state.gradient_state import Rows
from trainer_lib.state.partial_state import PartialState


class Parcel(NamedTuple):
    """What rank 0 sends to each rank in a round: a batch, if there is one, and what is known of the end."""

    holds_batch: bool
    batch: Any
    rows: Rows | None
    remainder: int
    is_last: bool  # the last batch of the rank that gets it
    is_end: bool  # no rank gets anything after it
    over: int | None


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads for all ranks: it sends each rank the batch that the rank would have read itself.

    For data that only one rank can read. Batches are sent as objects, so they may hold anything in any shape.
    `prepare_data_loader` makes it around a user's loader. Made by hand, it is made from a dataset, on all ranks.

    Args:
        dataset: The dataset.
        split_batches: The batch size is that of all ranks together.
        skip_batches: How many batches of the first pass to skip.
        use_stateful_dataloader: Be an instance of torchdata's `StatefulDataLoader` too.
        _non_blocking: Do not wait for copies to the device.
        slice_fn: With `split_batches`: cuts a rank's slice from a batch; see `prepare_data_loader`.
        iteration: The epoch of the first pass.
        **kwargs: Arguments of `DataLoader`.
    """

    slicing: Slicing | None = None  # how the batches of the reader are cut, if each is one for all ranks
    _LOCAL_ATTRIBUTES = PreparedLoader._LOCAL_ATTRIBUTES | {"_rank", "slicing"}

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            self.__class__ = stateful_kind(type(self))
        loader, state = DataLoader(dataset, drop_last=kwargs.pop("drop_last", _drop_last), **kwargs), PartialState()
        check_preparable(loader, torch_device_mesh)
        split = RankSplit(
            processes=state.data_group.size,
            index=state.data_group.rank,
            split_batches=split_batches,
            slice_function=slice_fn,
            dispatches=True,
            group=state.data_group,
            world=state.group,
        )
        (seed,) = state.group.broadcast_objects([positive_seed(torch.initial_seed())])
        self.set_up(split.reader(loader), split, Delivery(device=state.device, non_blocking=_non_blocking), seed)
        self.begin_at(iteration, skip_batches)

    def set_up(self, source: tuple[Reader, Slicing | None], split: RankSplit, delivery: Delivery, seed: int) -> None:
        """Initialize; see `around`."""
        super().set_up(source, split, delivery, seed)
        (reader, self.slicing), self._rank = source, split.index
        if self.slicing is None and self._world.rank == 0:
            reader.read_for_all()

    def _samples_from(self, reading: Pass, start: int, rows: Rows | None) -> list[Any] | None:
        rank, cut = self._rank, self.slicing
        if cut is None:
            return self._reader.samples(self._seed, reading, start, rank, rows)
        samples = self._reader.samples(self._seed, reading, start, 0, None)
        if samples is None:
            return None
        share = (cut.batch_size or len(samples)) // cut.processes
        return samples[rank * share : rank * share + (share if rows is None else rows.real)]

    def trim_repeats(self) -> None:
        """Do nothing where rank 0 cuts whole batches, since the cut needs all rows."""
        if self.slicing is None:
            super().trim_repeats()

    def skip_bad_samples(self, quarantine: Quarantine) -> None:
        """Raise: the other ranks get batches without the list of skipped samples."""
        raise UnsupportedError(
            "Bad samples cannot be skipped with dispatch_batches=True. Set dispatch_batches=False, or let bad samples "
            "raise."
        )

    def _read(self, place: LoaderPosition, ending: Ending) -> Iterator[Any]:
        rounds = self._rounds(place) if self._world.rank == 0 else None
        if rounds is None:
            self._reader.leave_unread(place)
        received, is_end = 0, False
        while not is_end:
            parcel = self._next_parcel(rounds)
            is_end = parcel.is_end
            received += parcel.holds_batch
            ending.over, ending.remainder = parcel.over, parcel.remainder
            if parcel.is_last:
                ending.batches = received
            if parcel.holds_batch:
                is_counted = parcel.rows is not None or (self._reader.unit == "batches" and parcel.remainder >= 0)
                yield Counted(parcel.batch, parcel.rows, parcel.remainder) if is_counted else parcel.batch
        for _ in rounds or ():  # lets the sampler of rank 0 come to its end, as torch does
            pass

    def _next_parcel(self, rounds: Iterator[list[Parcel]] | None) -> Parcel:
        """Return this rank's parcel of the next round; an error of the first rank is raised on all."""
        error = HeldError("Reading the next batches for all ranks")
        if rounds is None:
            parcel = self._world.scatter_objects(None)
        else:
            parcel = None
            with error.held():  # an object that cannot be sent raises before anything is sent
                parcel = self._world.scatter_objects(self._for_all_ranks(next(rounds)))
            if error.report is not None:  # the other ranks wait for their batches
                parcel = self._world.scatter_objects([error.report] * self._world.size)
        if not isinstance(parcel, Parcel):  # the error report of the first rank
            error.raise_first([parcel])
        return parcel

    def _rounds(self, place: LoaderPosition) -> Iterator[list[Parcel]]:
        """Yield the parcels of the ranks that get different batches, round by round."""
        ending, read_ending, read, left = Ending(), Ending(), 0, None
        if self.slicing is None:
            batches = self._reader.open(place, self._seed, ending)
        else:
            batches = self.slicing.slices(self._reader.open(place, self._seed, read_ending), read_ending, ending)
        while left != 0:
            round_ = list(islice(batches, self._processes))
            read += len(round_)
            if len(round_) < self._processes:
                ending.batches = read
            left = None if ending.batches is None else ending.batches - read
            yield [self._parcel(rank, round_, left, ending) for rank in range(self._processes)]
        next(batches, None)

    def _for_all_ranks(self, round_: list[Parcel]) -> list[Parcel]:
        """Return the parcels of all ranks; consecutive ranks that hold parts of one replica get the same."""
        copies = self._world.size // self._processes
        return [parcel for parcel in round_ for _ in range(copies)]

    def _parcel(self, rank: int, round_: list[Any], left: int | None, ending: Ending) -> Parcel:
        holds_batch = rank < len(round_)
        batch, rows, remainder = round_[rank] if holds_batch else None, None, self._remainder(ending)
        if type(batch) is Counted:
            batch, rows, remainder = batch
        elif left == 0 and holds_batch:
            rows = self._reader.rows_of(batch, ending.rows.get(rank))
        return Parcel(
            holds_batch, batch, rows, remainder,
            # Of the batches that are left, the first ranks get one each.
            is_last=left is not None and left <= rank,
            is_end=left == 0,
            over=ending.over,
        )  # fmt: skip
