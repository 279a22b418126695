"""The position of a loader: its pass, and how much of the global order it has delivered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoaderPosition:
    """A position in the global order: `consumed` units of pass `epoch` were delivered."""

    epoch: int = 0
    consumed: int = 0
    bookmark: Any = None  # a state that makes going there faster, if there is one


@dataclass
class Pass:
    """The current or the last pass."""

    epoch: int
    consumed: int
    bookmark_before: Callable[[int], Any]  # returns the newest bookmark before a position of this pass
    finished: bool = False


class Progress:
    """The passes over a loader: the current one, its progress, and where the next one starts.

    Attributes:
        now: The current or the last pass.
        waited: The seconds spent waiting for batches.
    """

    def __init__(self) -> None:
        self.now: Pass | None = None
        self.waited = 0.0
        self._following = LoaderPosition()
        self._readers = 0

    @property
    def following(self) -> LoaderPosition:
        """Where the next pass starts."""
        return self._following

    def begin(self, place: LoaderPosition, bookmark_before: Callable[[int], Any]) -> Pass:
        """Start a pass at `place`; the pass after it is the next epoch."""
        self._following = LoaderPosition(place.epoch + 1)
        self._readers += 1
        self.now = Pass(place.epoch, place.consumed, bookmark_before)
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

    def where(self) -> LoaderPosition:
        """Return the position at which reading has to resume so that no sample is missed or repeated."""
        if self.now is None or self.now.finished:
            return self._following
        return LoaderPosition(self.now.epoch, self.now.consumed, self.now.bookmark_before(self.now.consumed))
