"""This file is the arithmetic of rounds: which process gets which units of a pass.

A unit is a sample; or a whole batch, where a sampler or dataset of the user's own makes the batches. A round gives
each process its share of consecutive units, the first process the first ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.gradient_state import Rows

TAKING_PART = 2  # samples that a rank without any of its own computes: BatchNorm needs two


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the units of a pass are dealt out.

    Args:
        share: The units that a process gets in a round.
        processes: How many processes share a round.
        ranks: The processes whose parts are read here: this one, or all where one process reads for all.
        drop_last: Leave out a last round that is not complete.
        fill: Complete it with the first units of the pass.
        trims: Of the units that complete it, give a process none but the one or two that it needs to take part
            where it has no units of its own.
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
        """Return how batches of `batch_size` samples (`None`: batches that come ready) are shared.

        Raises:
            ConfigurationError: If batches are to be split and do not go into that many equal parts.
        """
        if split_batches and batch_size is not None and batch_size % processes:
            raise ConfigurationError(
                f"split_batches=True: a batch of {batch_size} samples has no {processes} equal parts. "
                f"Give the loader a batch size that is a multiple of {processes}, or leave split_batches out."
            )
        share = 1 if batch_size is None else batch_size // processes if split_batches else batch_size
        return cls(
            share=share,
            processes=processes,
            ranks=(index,),
            drop_last=drop_last,
            # A process alone is even with itself.
            fill=even_batches and processes > 1,
        )

    @property
    def round_size(self) -> int:
        """The units of a whole round."""
        return self.share * self.processes

    def batches(self, units: int) -> int:
        """Return how many batches are read here of so many units."""
        rounds, rest = divmod(units, self.round_size)
        return rounds * len(self.ranks) + self.tail_batches(rest)

    def tail_batches(self, rest: int) -> int:
        """Return how many batches are read here of a last round that has `rest` units of its own."""
        if not rest or self.drop_last:
            return 0
        return len(self.ranks) if self.fill else sum(rest > rank * self.share for rank in self.ranks)

    def parts(self, units: list[Any], rest: int | None = None) -> Iterator[tuple[int, list[Any]]]:
        """Yield each process read here with its part of a round, unless that is empty.

        Args:
            units: The units of the round.
            rest: How many of them are no repeats; `None`: all.
        """
        for rank in self.ranks:
            start = rank * self.share
            held = self.share if rest is None or not self.trims else self._held(self._real(rest, rank))
            part = units[start : start + held]
            if part:
                yield rank, part

    def rows(self, rest: int, rank: int) -> Rows | None:
        """Return what a process's part of a last round of `rest` units holds, if it is not simply a full batch."""
        real = self._real(rest, rank)
        if real == self.share:
            return None
        return Rows(total=self._held(real), real=real, full=self.share)

    def _real(self, rest: int, rank: int) -> int:
        return min(max(rest - rank * self.share, 0), self.share)

    def _held(self, real: int) -> int:
        """Return how many units a process gets of a round in which `real` ones are its own."""
        if not self.fill:
            return real
        return real or min(TAKING_PART, self.share) if self.trims else self.share


@dataclass
class Ending:
    """What is known of the end of a pass; it is known before the last batch is handed out."""

    batches: int | None = None  # how many batches are read here
    over: int | None = None  # the position in the global order at which nothing is left for anybody
    remainder: int = -1  # the units of the last round that are no repeats; 0 if that is a whole round
    rows: dict[int, Rows] = field(default_factory=dict[int, Rows])  # what the last batches of processes hold

    def foresee(self, sharing: Sharing, batches: int, position: int, units: int) -> None:
        """Work out the end: `batches` were handed out up to `position`, and `units` are left from there on."""
        rounds, rest = divmod(units, sharing.round_size)
        rest = 0 if sharing.drop_last else rest
        self.batches = batches + sharing.batches(units)
        self.over = position + rounds * sharing.round_size + rest
        self.remainder = rest
        if rest:
            rows = {rank: sharing.rows(rest, rank) for rank in sharing.ranks}
            self.rows = {rank: of_rank for rank, of_rank in rows.items() if of_rank is not None and of_rank.total}


class Counted(NamedTuple):
    """A batch on its way to the user, with what is known of its rows."""

    batch: Any
    rows: Rows | None
    remainder: int


def deal(
    draw: Callable[[], list[Any]], opening: Callable[[], list[Any]], sharing: Sharing, position: int, ending: Ending
) -> Iterator[tuple[int, list[Any], int]]:
    """Yield the parts of one round after the other: the process, its units, and how many the round has of its own.

    Args:
        draw: Returns the units of the next round; fewer than a round, or none, at the end.
        opening: Returns the first units of the pass, as many as a round has (or all there are).
        sharing: Who gets what.
        position: Where in the pass the first round starts.
        ending: Is told the end as soon as it is known: a round ahead.
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
    """Return `units` completed to `size` with those of `opening`, over and over if need be."""
    return units + [opening[index % len(opening)] for index in range(size - len(units))]
