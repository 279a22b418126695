"""Triggers at intervals: logs, evaluations and checkpoints that are due, and the limit of time."""

import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from trainer_lib.events import Run, RunState
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.safety.deadline import Deadline

_FIELDS = {"log": "log_every", "evaluate": "eval_every", "save": "save_every"}


class Trigger:
    """Asks for one thing at an interval.

    Args:
        name: What is asked for, as `Control` knows it.
        interval: How often.
        state: Where the run stands.
        delay: How much of training comes before the first time.
        of_set: The evaluation set that it is for; `None`: there is one interval for all sets.
    """

    def __init__(
        self, name: str, interval: Every, state: RunState, delay: Every | None = None, of_set: str | None = None
    ) -> None:
        self.name, self.of_set, self._interval = name, of_set, interval
        self._amount, self.unit = interval.amount, interval.unit
        if self.unit == "epochs" and self._amount != int(self._amount) and not state.steps_per_epoch:
            raise ConfigurationError(
                f'{_field(name, of_set)}="{interval}": how long an epoch is cannot be known of this data. Give whole '
                "epochs, or steps."
            )
        self._next = self._after(state)
        self._delay = delay

    def is_due(self, state: RunState) -> bool:
        """Whether it is due after this step; asked once a step."""
        if self.unit == "steps":  # first: by far the most frequent
            return state.step % self._amount == 0 and self._is_begun(state)
        if self._now(state) < self._next:
            return False
        self._next = self._after(state)
        return self._is_begun(state)

    def _is_begun(self, state: RunState) -> bool:
        if self._delay is None:
            return True
        done = {"steps": state.step, "samples": state.samples, "epochs": state.epochs}[self._delay.unit]
        return done >= self._delay.amount - 1e-9

    def _now(self, state: RunState) -> float:
        if self.unit == "epochs":
            return state.epochs
        if self.unit == "tokens":
            return state.tokens or 0
        return time.monotonic() if self.unit == "seconds" else state.samples

    def _after(self, state: RunState) -> float:
        if self.unit == "seconds":
            return time.monotonic() + self._amount
        # A little more, so that 3 × 0.1 epochs are not less than 0.3.
        return (math.floor(self._now(state) / self._amount + 1e-9) + 1) * self._amount - 1e-9


class Triggers:
    """All that is due at intervals.

    Args:
        intervals: How often, by what is asked for.
        eval_intervals: How often to evaluate each set, by its name; empty: they share one interval.
        time_limit: How many seconds the run may take, those before a restart included.
        run: The run.
        deadline: When it has to be through, on the process whose clock counts.
        eval_delay: How much of training comes before the first evaluation.
    """

    def __init__(
        self,
        intervals: dict[str, Every | None],
        time_limit: float | None,
        run: Run,
        deadline: Deadline | None = None,
        eval_delay: Every | None = None,
        eval_intervals: Mapping[str, Every | None] = MappingProxyType({}),
    ) -> None:
        self._deadline = deadline
        every = [
            Trigger(name, interval, run.state, eval_delay if name == "evaluate" else None)
            for name, interval in intervals.items()
            if interval is not None
        ]
        every += [
            Trigger("evaluate_sets", interval, run.state, eval_delay, of_set)
            for of_set, interval in eval_intervals.items()
            if interval is not None
        ]
        # The same on all processes, which therefore need not agree; their clocks are not.
        self._counted = [trigger for trigger in every if trigger.unit != "seconds"]
        self._timed = [trigger for trigger in every if trigger.unit == "seconds"] if run.is_main_process else []
        self._limit = time_limit if run.is_main_process else None
        self._ends_at = None if self._limit is None else time.monotonic() + max(0.0, self._limit - run.state.seconds)

    def ask(self, run: Run) -> None:
        """Ask for what is due after this step."""
        for trigger in self._counted:
            if trigger.is_due(run.state):
                run.control.agree(trigger.name)
                _note(run, trigger)
        for trigger in self._timed:
            if trigger.is_due(run.state):
                run.control.ask(trigger.name)
                _note(run, trigger)
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            run.control.reason = "max_time is over"
            run.control.stop = True
        if self._deadline is not None:
            self._deadline.end_step()


def _note(run: Run, trigger: Trigger) -> None:
    if trigger.name == "save":
        run.control.save_reasons.add("interval")
    if trigger.of_set is not None:
        run.control.sets_due.add(trigger.of_set)


def _field(name: str, of_set: str | None) -> str:
    return _FIELDS[name] if of_set is None else f"eval_every[{of_set!r}]"
