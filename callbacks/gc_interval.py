"""Garbage collection at an interval, on all ranks at once."""

import gc
from typing import Any, ClassVar

from trainer_lib.events import Modifier, Run
from trainer_lib.events.trigger import callback_trigger


class GarbageSchedule(Modifier):
    """Runs Python's garbage collection only at an interval.

    Python otherwise collects whenever enough objects were created, at a different step on each rank, and each time the
    other ranks wait for the one that collects.

    Args:
        every: The interval, such as "500 steps".

    Example:
        >>> schedule = GarbageSchedule("500 steps")
        >>> schedule.on_fit_begin(Run())
        >>> gc.isenabled()
        False
        >>> schedule.on_fit_end(Run())
    """

    changes_weights: ClassVar[bool] = False

    def __init__(self, every: Any) -> None:
        self._trigger = callback_trigger(every, "gc_every")
        self._was_enabled = False

    def on_fit_begin(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        self._trigger.begin(run.state)
        gc.disable()
        gc.collect()

    def on_step_end(self, run: Run) -> None:
        if self._trigger.is_due(run.state):
            gc.collect()

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._was_enabled:
            gc.enable()
