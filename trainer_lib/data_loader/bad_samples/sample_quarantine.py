"""The list of samples that could not be read and were skipped, kept in the main process of a loader."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_lib.data_loader.bad_samples.guarded_dataset import BadSample, FilteredBatch, MarkedBatch, SkippedKey
from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending, Sharing
from trainer_lib.foundation.errors import BadSampleError
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows

_SHOWN = 8


class Entry(NamedTuple):
    """A sample that was skipped."""

    index: Any
    epoch: int  # the pass in which it first failed
    process: int
    worker: int | None
    error: str


class Quarantine:
    """The samples that could not be read: those of this rank at once, those of all ranks after they synchronize.

    In the pass in which a sample first fails, each rank that reads it finds out by itself. In later passes no rank
    reads it.

    Args:
        group: The ranks.
        most: How many bad samples are allowed, over all ranks.
        limit: The name of that limit in errors.
        ask: Called when there may be more than allowed and the ranks have to synchronize.

    Attributes:
        agreed: The entries that all ranks know, by index, in the order in which they failed.
        kept: The rows that are left of the current batch; `None`: all.
    """

    def __init__(self, group: ProcessGroup, most: int, limit: str, ask: Callable[[], None] | None = None) -> None:
        self._group, self._most, self._limit, self._ask = group, most, limit, ask
        self.agreed: dict[Any, Entry] = {}
        self.kept: list[int] | None = None
        self._fresh: dict[Any, Entry] = {}

    def add(self, bad: Sequence[BadSample], epoch: int) -> None:
        """Add samples that this rank could not read."""
        for sample in bad:
            if sample.index not in self.agreed:
                entry = Entry(sample.index, epoch, self._group.rank, sample.worker, sample.error)
                self._fresh.setdefault(sample.index, entry)
        if len(self.agreed) + len(self._fresh) > self._most:
            if self._group.size == 1:
                self.sync_across_ranks()
            elif self._ask is not None:
                self._ask()

    def sync_across_ranks(self) -> list[Entry]:
        """Exchange new entries between all ranks, and return them. All ranks have to call it.

        Raises:
            BadSampleError: If there are more than allowed.
        """
        by_rank: list[list[Entry]] = self._group.all_gather_objects(list(self._fresh.values()))
        self._fresh.clear()
        new: list[Entry] = []
        for entry in (entry for entries in by_rank for entry in entries):
            if entry.index not in self.agreed:
                self.agreed[entry.index] = entry
                new.append(entry)
        if len(self.agreed) > self._most:
            raise BadSampleError(
                f"{len(self.agreed)} samples could not be read, and {self._limit} allows {self._most}. "
                f"{self.description()}"
            )
        return new

    def description(self) -> str:
        """Return the samples and their errors as a sentence."""
        entries = list(self.agreed.values())
        lines = [f"{entry.index!r} ({entry.error})" for entry in entries[:_SHOWN]]
        more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
        return f"They are {', '.join(lines)}{more}."

    def before(self, epoch: int) -> frozenset[Any]:
        """Return the samples that a pass skips: those that failed in an earlier pass."""
        return frozenset(index for index, entry in self.agreed.items() if entry.epoch < epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that all ranks know."""
        return {"samples": [list(entry) for entry in self.agreed.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the entries of `state_dict`."""
        self._fresh.clear()
        entries = [Entry(*fields) for fields in state["samples"]]
        self.agreed = {entry.index: entry for entry in entries}


class MarkedKeys:
    """A sampler (or batch sampler) that marks the samples to skip.

    Args:
        source: The sampler.
        by_batches: Whether it yields batches.
        is_keyed: Whether its keys are those of `SeededKeys`.
    """

    by_batches: bool
    is_keyed: bool
    source: Any

    def __init__(self, source: Any, by_batches: bool, is_keyed: bool) -> None:
        self.source, self.by_batches, self.is_keyed = source, by_batches, is_keyed
        self.skipped: frozenset[Any] = frozenset()

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return self._marked() if self.skipped else iter(self.source)

    def _marked(self) -> Iterator[Any]:
        for unit in self.source:
            if not self.by_batches:
                yield SkippedKey(unit) if self._is_skipped(unit) else unit
            elif any(self._is_skipped(key) for key in unit):
                yield MarkedBatch(SkippedKey(key) if self._is_skipped(key) else key for key in unit)
            else:
                yield unit

    def _is_skipped(self, key: Any) -> bool:
        index = key[1] if self.is_keyed else key
        return not isinstance(index, list) and index in self.skipped

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler inside."""
        if name == "source":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.source, name)


def with_row_counts(
    batches: Iterator[Any], quarantine: Quarantine, epoch: int, ending: Ending, sharing: Sharing, whole_batches: bool
) -> Iterator[Any]:
    """Yield batches; those from which samples were skipped come with the count of their remaining rows.

    Args:
        batches: The batches of this rank.
        quarantine: Collects the skipped samples.
        epoch: The pass.
        ending: How the pass ends.
        sharing: How units are shared.
        whole_batches: Whether a unit is a batch.
    """
    (rank,) = sharing.ranks
    for number, batch in enumerate(batches, 1):
        if type(batch) is not FilteredBatch:
            quarantine.kept = None
            yield batch
            continue
        quarantine.add(batch.bad, epoch)
        quarantine.kept = batch.kept
        is_last = ending.batches == number
        tail = ending.rows.get(rank) if is_last else None
        remainder = ending.remainder if is_last and not whole_batches else -1
        yield Counted(batch.batch, _rows(batch, tail, sharing, whole_batches), remainder)


def _rows(batch: FilteredBatch, tail: Rows | None, sharing: Sharing, whole_batches: bool) -> Rows:
    total = len(batch.kept) or ignorant_find_batch_size(batch.batch) or 1
    if whole_batches:
        return Rows(total, total if batch.kept and tail is None else 0)
    real = math.inf if tail is None else tail.real
    return Rows(total, sum(row < real for row in batch.kept), sharing.share)
