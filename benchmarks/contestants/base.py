"""The interface of a contestant: one loop of each kind, with a meter around it."""

from importlib.util import find_spec
from typing import Any, ClassVar

from benchmarks.meters import Meter
from benchmarks.task import Task


class NotOfferedError(Exception):
    """The contestant has no loop of this kind."""


class Contestant:
    """One way to train. Each loop enters `meter` around nothing but itself and returns a number to compare.

    The number is what the loop came to (`weights_norm`, `labels_sum`): all contestants have to come to the same.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None  # what has to be installed for it
    statement: ClassVar[str | None] = None  # what a script imports of it

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its package is there."""
        return cls.package is None or find_spec(cls.package) is not None

    @classmethod
    def takes_part(cls, loop: str) -> bool:
        """Whether it has loops of this kind at all."""
        return getattr(cls, loop) is not getattr(Contestant, loop)

    def update(self, task: Task, meter: Meter) -> float:
        """Train, with an update for each batch, or for each `task.accumulation` of them."""
        raise NotOfferedError

    def update_by_weight(self, task: Task, meter: Meter) -> float:
        """Train on the mean over the labels that count, on all processes together."""
        raise NotOfferedError

    def fit(self, task: Task, meter: Meter) -> float:
        """Train as `update` does, in a loop that is not one's own, which logs each `LOG_EVERY` steps."""
        raise NotOfferedError

    def fit_by_default(self, task: Task, meter: Meter) -> float:
        """Train with what is there by default, the optimizer included."""
        raise NotOfferedError

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Find the mean loss and the accuracy of `task.scores()`, in this order; return their sum."""
        raise NotOfferedError

    def read(self, task: Task, meter: Meter) -> float:
        """Go through the data and do nothing with it."""
        raise NotOfferedError

    def reset(self) -> None:
        """Reset process-wide state, so that the next run starts fresh."""


def around(callback: Any, begin: str, end: str, meter: Meter) -> Any:
    """Return a callback that calls the meter.

    Args:
        callback: What a library calls a callback: a class, whose methods are events.
        begin: The event before the first batch.
        end: The event after the last step.
        meter: The meter.
    """
    methods = {begin: lambda *_, **__: meter.start(), end: lambda *_, **__: meter.stop()}
    return type("Around", (callback,), methods)()
