"""Results: medians and spreads over the rounds, one row per contestant."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Sample(NamedTuple):
    """One run of one contestant: seconds a step, or of the run where that has a process of its own."""

    cpu: float
    wall: float
    memory: float = 0.0  # the most that the process had, in bytes; 0: not measured


class Spread(NamedTuple):
    """A median, and what it is the median of reaches from and to."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant in one scenario; the first row of a scenario is what the others are compared with."""

    contestant: str
    samples: Sequence[Sample] = ()
    baseline: Sequence[Sample] = ()
    calls: float | None = None
    note: str = ""  # why there are no samples
    target: str = ""

    @property
    def cpu(self) -> Spread:
        """Seconds of the processor a step."""
        return _spread([sample.cpu for sample in self.samples])

    @property
    def wall(self) -> Spread:
        """Seconds a step."""
        return _spread([sample.wall for sample in self.samples])

    @property
    def memory(self) -> float:
        """The most that the process had, in bytes; 0 where that was not measured."""
        return median(sample.memory for sample in self.samples)

    @property
    def cpu_ratio(self) -> Spread:
        """The processor's time beside that of the baseline, round by round."""
        pairs = zip(self.samples, self.baseline, strict=True)
        return _spread([ours.cpu / other.cpu for ours, other in pairs])

    @property
    def calm_ratio(self) -> float:
        """The processor's time beside that of the baseline, in the runs that nothing else got in the way of."""
        return _calm(self.samples) / _calm(self.baseline)

    @property
    def wall_ratio(self) -> Spread:
        """The time beside that of the baseline, round by round."""
        pairs = zip(self.samples, self.baseline, strict=True)
        return _spread([ours.wall / other.wall for ours, other in pairs])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows of one scenario."""

    name: str
    title: str
    rows: Sequence[Row]


def _calm(samples: Sequence[Sample]) -> float:
    """Return the tenth percentile: the lowest value of all is sometimes a fluke of the clock."""
    times = sorted(sample.cpu for sample in samples)
    return times[(len(times) - 1) // 10]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))
