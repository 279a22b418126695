"""This file is the list of samples that could not be read and were left out; in the main process of a loader."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_lib.data_loader.bad_samples.guarded_dataset import BadSample, LeftOut, Marked, Sifted
from trainer_lib.data_loader.order.rank_rounds import Counted, Ending, Sharing
from trainer_lib.foundation.errors import BadSampleError
from trainer_lib.foundation.pytree import ignorant_find_batch_size
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows

_SHOWN = 8


class Entry(NamedTuple):
    """A sample that was left out."""

    index: Any
    epoch: int  # the pass in which it was first met
    process: int
    worker: int | None
    error: str


class Quarantine:
    """The samples that could not be read: those of this process at once, those of all when the processes agree.

    In the pass in which a sample is met each process that comes across it finds out for itself; in later passes none
    of them reads it.

    Args:
        group: The processes.
        most: How many there may be, over all processes.
        limit: How errors call that number.
        ask: Is called when there seem to be more, where the processes have to meet to say so.

    Attributes:
        agreed: What all processes know of, by index, in the order in which it was met.
        kept: The places that are left of the batch in hand; `None`: all.
    """

    def __init__(self, group: ProcessGroup, most: int, limit: str, ask: Callable[[], None] | None = None) -> None:
        self._group, self._most, self._limit, self._ask = group, most, limit, ask
        self.agreed: dict[Any, Entry] = {}
        self.kept: list[int] | None = None
        self._fresh: dict[Any, Entry] = {}

    def note(self, bad: Sequence[BadSample], epoch: int) -> None:
        """Note samples that this process could not read."""
        for one in bad:
            if one.index not in self.agreed:
                self._fresh.setdefault(one.index, Entry(one.index, epoch, self._group.rank, one.worker, one.error))
        if len(self.agreed) + len(self._fresh) > self._most:
            if self._group.size == 1:
                self.agree()
            elif self._ask is not None:
                self._ask()

    def agree(self) -> list[Entry]:
        """Have all processes know of all samples, and return what is new to them. All of them have to ask.

        Raises:
            BadSampleError: If there are too many.
        """
        told: list[list[Entry]] = self._group.all_gather_objects(list(self._fresh.values()))
        self._fresh.clear()
        new: list[Entry] = []
        for entry in (entry for entries in told for entry in entries):
            if entry.index not in self.agreed:
                self.agreed[entry.index] = entry
                new.append(entry)
        if len(self.agreed) > self._most:
            raise BadSampleError(
                f"{len(self.agreed)} samples could not be read, and {self._limit} allows {self._most}. {self.told()}"
            )
        return new

    def told(self) -> str:
        """Return the samples in words."""
        entries = list(self.agreed.values())
        lines = [f"{entry.index!r} ({entry.error})" for entry in entries[:_SHOWN]]
        more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
        return f"They are {', '.join(lines)}{more}."

    def before(self, epoch: int) -> frozenset[Any]:
        """Return the samples that are not read in a pass: those met in an earlier one."""
        return frozenset(index for index, entry in self.agreed.items() if entry.epoch < epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what all processes know of."""
        return {"samples": [list(entry) for entry in self.agreed.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it up."""
        self._fresh.clear()
        entries = [Entry(*one) for one in state["samples"]]
        self.agreed = {entry.index: entry for entry in entries}


class MarkedKeys:
    """A sampler (or batch sampler) that marks the samples that are not to be read.

    Args:
        source: The sampler.
        by_batches: Whether it yields batches.
        is_keyed: Whether its keys are those of `SeededKeys`.
    """

    def __init__(self, source: Any, by_batches: bool, is_keyed: bool) -> None:
        self.source, self.by_batches, self.is_keyed = source, by_batches, is_keyed
        self.left_out: frozenset[Any] = frozenset()

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return self._marked() if self.left_out else iter(self.source)

    def _marked(self) -> Iterator[Any]:
        for unit in self.source:
            if not self.by_batches:
                yield LeftOut(unit) if self._is_out(unit) else unit
            elif any(self._is_out(key) for key in unit):
                yield Marked(LeftOut(key) if self._is_out(key) else key for key in unit)
            else:
                yield unit

    def _is_out(self, key: Any) -> bool:
        index = key[1] if self.is_keyed else key
        return not isinstance(index, list) and index in self.left_out

    def __getattr__(self, name: str) -> Any:
        """Return what else the sampler has."""
        if name == "source":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.source, name)


def counted(
    batches: Iterator[Any], quarantine: Quarantine, epoch: int, ending: Ending, sharing: Sharing, whole_batches: bool
) -> Iterator[Any]:
    """Yield batches; those from which samples were left out with what is left of their rows.

    Args:
        batches: The batches of this process.
        quarantine: Notes what was left out.
        epoch: The pass.
        ending: How it ends.
        sharing: How units are shared.
        whole_batches: A unit is a batch.
    """
    (rank,) = sharing.ranks
    for number, batch in enumerate(batches, 1):
        if type(batch) is not Sifted:
            quarantine.kept = None
            yield batch
            continue
        quarantine.note(batch.bad, epoch)
        quarantine.kept = batch.kept
        is_last = ending.batches == number
        tail = ending.rows.get(rank) if is_last else None
        yield Counted(batch.batch, _rows(batch, tail, sharing, whole_batches), ending.remainder if is_last else -1)


def _rows(batch: Sifted, tail: Rows | None, sharing: Sharing, whole_batches: bool) -> Rows:
    total = len(batch.kept) or ignorant_find_batch_size(batch.batch) or 1
    if whole_batches:
        return Rows(total, total if batch.kept and tail is None else 0)
    real = math.inf if tail is None else tail.real
    return Rows(total, sum(place < real for place in batch.kept), sharing.share)
