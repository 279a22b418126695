"""This file is the collection of Python's garbage at times of one's choosing, on all processes at once."""

import gc
from typing import Any

from trainer_lib.events import Modifier, Run
from trainer_lib.events.gates import EveryAmount


class GarbageSchedule(Modifier):
    """Collects garbage at an interval only.

    Python collects whenever enough objects were made, which is at another step on each process; each time all others
    wait for the one that collects.

    Args:
        every: How often, such as "500 steps".

    Example:
        >>> schedule = GarbageSchedule("500 steps")
        >>> schedule.on_fit_begin(Run())
        >>> gc.isenabled()
        False
        >>> schedule.on_fit_end(Run())
    """

    def __init__(self, every: Any) -> None:
        self._gate = EveryAmount(every, "gc_every")
        self._was_enabled = False

    def on_fit_begin(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        self._gate.begin(run.state)
        gc.disable()
        gc.collect()

    def on_step_end(self, run: Run) -> None:
        if self._gate.opens_at_end(run.state):
            gc.collect()

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._was_enabled:
            gc.enable()
