"""The position of a loader: its pass, and how much of the global order it has delivered."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainer_lib.data_loader.order.epoch_start import EpochStart
from trainer_lib.foundation.light_dataclasses import LightDataclass, frozen_dataclass


@frozen_dataclass
class LoaderPosition:
    """A position in the global order: `consumed` units of pass `epoch` were delivered."""

    epoch: int = 0
    consumed: int = 0
    bookmark: Any = None  # a state that makes going there faster, if there is one
    start: EpochStart | None = None  # where the epoch started, if its order follows from random generators


@dataclass(repr=False, eq=False)
class Pass(LightDataclass):
    """The current or the last pass."""

    epoch: int
    consumed: int
    bookmark_before: Callable[[int], Any]  # returns the newest bookmark before a position of this pass
    start: EpochStart | None = None
    finished: bool = False
    is_cut: bool = False  # whether it ends before its last batch


class Progress:
    """The passes over a loader: the current one, its progress, and where the next one starts.

    Attributes:
        now: The current or the last pass.
        waited: The seconds spent waiting for batches.
    """

    def __init__(self) -> None:
        self.now: Pass | None = None
        self.waited: float = 0.0
        self._following = LoaderPosition()
        self._readers = 0
        self._first: EpochStart | None = None

    @property
    def following(self) -> LoaderPosition:
        """Where the next pass starts."""
        return self._following

    def begin(self, place: LoaderPosition, bookmark_before: Callable[[int], Any]) -> Pass:
        """Start a pass at `place`; the pass after it is the next epoch."""
        self._following = LoaderPosition(place.epoch + 1)
        self._readers += 1
        self._first = self._first or place.start
        self.now = Pass(place.epoch, place.consumed, bookmark_before, place.start)
        return self.now

    def leave(self) -> None:
        """Record that a pass is no longer read, finished or not."""
        self._readers -= 1

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next pass; a position inside it, from a loaded state, is kept."""
        if self._following.epoch != epoch:
            self._following = LoaderPosition(epoch)
        if not self._readers:
            self.now = None

    def go_to(self, place: LoaderPosition) -> None:
        """Start the next pass at `place`."""
        self._following, self.now = place, None

    @property
    def at_last_batch(self) -> bool:
        """Whether the last batch of a pass is in hand, so that torch has not asked its sampler for an end yet."""
        return self._readers > 0 and self.now is not None and self.now.finished and not self.now.is_cut

    def rewind(self) -> None:
        """Start the next pass where the first one started."""
        self.go_to(LoaderPosition(start=self._first and replace(self._first, is_new=False)))

    def where(self) -> LoaderPosition:
        """Return the position at which reading has to resume so that no sample is missed or repeated."""
        if self.now is None or self.now.finished:
            return self._following
        now = self.now
        return LoaderPosition(now.epoch, now.consumed, now.bookmark_before(now.consumed), now.start)
