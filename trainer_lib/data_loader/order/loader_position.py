"""This file is where a loader is: the pass, and how much of the global order has been handed out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A position in the global order: `consumed` units of pass `epoch` are behind it."""

    epoch: int = 0
    consumed: int = 0
    bookmark: Any = None  # what helps to get there, if anything does


@dataclass
class Pass:
    """A pass that is being read, or was."""

    epoch: int
    consumed: int
    bookmark_before: Callable[[int], Any]  # what helps to get to a position of this pass
    finished: bool = False


class Progress:
    """The passes over a loader: which is being read, how far it has come, and where the next one starts.

    Attributes:
        now: The pass that is being read, or was.
        waited: How many seconds batches were waited for.
    """

    def __init__(self) -> None:
        self.now: Pass | None = None
        self.waited = 0.0
        self._following = Place()
        self._readers = 0

    @property
    def following(self) -> Place:
        """Where the next pass starts."""
        return self._following

    def begin(self, place: Place, bookmark_before: Callable[[int], Any]) -> Pass:
        """Start a pass at `place`; the one after it is the next epoch."""
        self._following = Place(place.epoch + 1)
        self._readers += 1
        self.now = Pass(place.epoch, place.consumed, bookmark_before)
        return self.now

    def leave(self) -> None:
        """Note that a pass is no longer read, finished or not."""
        self._readers -= 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; a position inside of it, from a loaded state, stays."""
        if self._following.epoch != epoch:
            self._following = Place(epoch)
        if not self._readers:
            self.now = None

    def go_to(self, place: Place) -> None:
        """Have the next pass start at `place`."""
        self._following, self.now = place, None

    def where(self) -> Place:
        """Return where reading would have to go on so that nothing is missed or repeated."""
        if self.now is None or self.now.finished:
            return self._following
        return Place(self.now.epoch, self.now.consumed, self.now.bookmark_before(self.now.consumed))
