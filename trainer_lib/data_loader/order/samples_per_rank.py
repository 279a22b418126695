"""Which rank reads which samples of a pass: rounds of units, shared out in order.

A unit is a sample, or a whole batch where a user's sampler or dataset makes the batches. A round gives each rank its
share of consecutive units; rank 0 gets the first ones.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import LightDataclass, frozen_dataclass
from trainer_lib.state.gradient_state import Rows

TAKING_PART = 2  # samples that a rank without samples of its own computes: BatchNorm needs two


@frozen_dataclass(kw_only=True)
class Sharing:
    """How the units of a pass are divided between ranks.

    Args:
        share: The units that a rank gets in a round.
        processes: How many ranks share a round.
        ranks: The ranks whose parts are read here: this rank, or all where one rank reads for all.
        drop_last: Drop an incomplete last round.
        fill: Fill an incomplete last round with the first units of the pass.
        trims: Of the units that fill the last round, give a rank only the one or two that it needs to take part
            if it has no units of its own.
    """

    share: int = 1
    processes: int = 1
    ranks: tuple[int, ...] = (0,)
    drop_last: bool = False
    fill: bool = False
    trims: bool = False

    @classmethod
    def of_batches(
        cls,
        batch_size: int | None,
        processes: int,
        index: int,
        split_batches: bool = False,
        drop_last: bool = False,
        even_batches: bool = True,
    ) -> "Sharing":
        """Return how batches of `batch_size` samples (`None`: batches made by the dataset) are divided.

        Raises:
            ConfigurationError: If batches are to be split and do not divide into equal parts.
        """
        if split_batches and batch_size is not None and batch_size % processes:
            raise ConfigurationError(
                f"split_batches=True: batch_size={batch_size} does not split into {processes} equal parts. "
                f"Use a batch_size that is a multiple of {processes}, or set split_batches=False."
            )
        share = 1 if batch_size is None else batch_size // processes if split_batches else batch_size
        return cls(
            share=share,
            processes=processes,
            ranks=(index,),
            drop_last=drop_last,
            # A single rank has nothing to be even with.
            fill=even_batches and processes > 1,
        )

    @property
    def round_size(self) -> int:
        """The units of a whole round."""
        return self.share * self.processes

    def batches(self, units: int) -> int:
        """Return how many of the batches of so many units are read here."""
        rounds, rest = divmod(units, self.round_size)
        return rounds * len(self.ranks) + self.tail_batches(rest)

    def tail_batches(self, rest: int) -> int:
        """Return how many batches of a last round with `rest` real units are read here."""
        if not rest or self.drop_last:
            return 0
        return len(self.ranks) if self.fill else sum(rest > rank * self.share for rank in self.ranks)

    def parts(self, units: list[Any], rest: int | None = None) -> Iterator[tuple[int, list[Any]]]:
        """Yield each rank read here with its part of a round, unless the part is empty.

        Args:
            units: The units of the round.
            rest: How many of them are real, not repeats; `None`: all.
        """
        for rank in self.ranks:
            start = rank * self.share
            held = self.share if rest is None or not self.trims else self._held(self.real(rest, rank))
            part = units[start : start + held]
            if part:
                yield rank, part

    def rows(self, rest: int, rank: int) -> Rows | None:
        """Return the row counts of a rank's part of a last round of `rest` units; `None` for a full batch."""
        real = self.real(rest, rank)
        if real == self.share:
            return None
        return Rows(total=self._held(real), real=real, full=self.share)

    def real(self, rest: int, rank: int) -> int:
        """Return how many units of its own a rank has in a round of `rest` real units."""
        return min(max(rest - rank * self.share, 0), self.share)

    def _held(self, real: int) -> int:
        """Return how many units a rank gets of a round in which `real` units are its own."""
        if not self.fill:
            return real
        return real or min(TAKING_PART, self.share) if self.trims else self.share


@dataclass(repr=False, eq=False)
class Ending(LightDataclass):
    """What is known of the end of a pass, which is known before the last batch is delivered."""

    batches: int | None = None  # how many batches are read here
    over: int | None = None  # the position in the global order at which no rank has anything left
    remainder: int = -1  # the real units of the last round; 0 if it is a whole round
    rows: dict[int, Rows] = field(default_factory=dict[int, Rows])  # what the last batches of ranks hold
    # Of the rounds of a user's batches that were drawn: the samples that each rank gets. None: nobody counts them.
    sizes: deque[list[int | None]] | None = None

    def foresee(self, sharing: Sharing, batches: int, position: int, units: int) -> None:
        """Compute the end: `batches` were delivered up to `position`, and `units` are left from there on."""
        rounds, rest = divmod(units, sharing.round_size)
        rest = 0 if sharing.drop_last else rest
        self.batches = batches + sharing.batches(units)
        self.over = position + rounds * sharing.round_size + rest
        self.remainder = rest
        if rest:
            rows = {rank: sharing.rows(rest, rank) for rank in sharing.ranks}
            self.rows = {rank: counts for rank, counts in rows.items() if counts is not None and counts.total}


class Counted(NamedTuple):
    """A batch to deliver, with the counts of its rows."""

    batch: Any
    rows: Rows | None
    remainder: int


def deal(
    draw: Callable[[], list[Any]], opening: Callable[[], list[Any]], sharing: Sharing, position: int, ending: Ending
) -> Iterator[tuple[int, list[Any], int]]:
    """Yield the parts of one round after the other: the rank, its units, and the real units of the round.

    Args:
        draw: Returns the units of the next round; fewer than a round, or none, at the end.
        opening: Returns the first units of the pass: a round of them, or all if there are fewer.
        sharing: How units are divided between ranks.
        position: The position in the pass at which the first round starts.
        ending: Receives the end as soon as it is known: a round ahead.
    """
    size, batches = sharing.round_size, 0
    units = draw()
    if len(units) < size:
        ending.foresee(sharing, batches, position, len(units))
    while len(units) == size:
        upcoming = draw()
        batches += len(sharing.ranks)
        position += size
        if len(upcoming) < size:
            ending.foresee(sharing, batches, position, len(upcoming))
        for rank, part in sharing.parts(units):
            yield rank, part, size
        units = upcoming
    if sharing.tail_batches(len(units)):
        filled = completed(units, opening(), size) if sharing.fill else units
        for rank, part in sharing.parts(filled, len(units)):
            yield rank, part, len(units)


def completed(units: list[Any], opening: list[Any], size: int) -> list[Any]:
    """Return `units` filled up to `size` with the units of `opening`, repeated if necessary."""
    return units + [opening[index % len(opening)] for index in range(size - len(units))]
