"""Requests at intervals for logs, evaluations and checkpoints, and the limit of time."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from trainer_lib.events import Run, RunState
from trainer_lib.events.trigger import Trigger
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.trainer.fit.train_clock import TrainClock
from trainer_lib.trainer.safety.deadline import Deadline

_FIELDS = {"log": "log_every", "evaluate": "eval_every", "save": "save_every"}


@frozen_dataclass
class IntervalRequest:
    """A request that is made at an interval.

    Attributes:
        name: The request, as `Control` knows it.
        trigger: When it is due.
        delay: How much of training comes before the first time.
        of_set: The evaluation set that it is for; `None`: there is one interval for all sets.
    """

    name: str
    trigger: Trigger
    delay: Trigger | None = None
    of_set: str | None = None

    def make(self, run: Run, ask: Callable[[str], None]) -> None:
        """Make the request that is due, unless it is delayed."""
        if self.delay is not None and not self.delay.is_reached(run.state):
            return
        ask(self.name)
        if self.name == "save":
            run.control.save_reasons.add("interval")
        if self.of_set is not None:
            run.control.sets_due.add(self.of_set)


class Triggers:
    """Makes the requests that are due after an update.

    Args:
        intervals: How often each request is made, by its name.
        eval_intervals: How often to evaluate each set, by its name; empty: they share one interval.
        time_limit: How many seconds the run may train, including those before a resume.
        run: The run.
        clock: Counts the time of training.
        deadline: When the run has to end, on the rank whose clock counts.
        eval_delay: How much of training comes before the first evaluation.
    """

    def __init__(
        self,
        intervals: dict[str, Every | None],
        time_limit: float | None,
        run: Run,
        clock: TrainClock,
        deadline: Deadline,
        eval_delay: Every | None = None,
        eval_intervals: Mapping[str, Every | None] = MappingProxyType({}),
    ) -> None:
        self._run, self._clock, self._deadline = run, clock, deadline
        self._intervals, self._eval_intervals, self._eval_delay = intervals, eval_intervals, eval_delay
        self._limit = time_limit if run.is_main_process else None
        self._counted: list[IntervalRequest] = []
        self._timed: list[IntervalRequest] = []

    def restart(self) -> None:
        """Count from the state that the run has now."""
        run = self._run
        delay = None if self._eval_delay is None else Trigger(self._eval_delay)
        requests = [
            IntervalRequest(name, _trigger(_FIELDS[name], interval, run.state), delay if name == "evaluate" else None)
            for name, interval in self._intervals.items()
            if interval is not None
        ]
        requests += [
            IntervalRequest("evaluate_sets", _trigger(f"eval_every[{of_set!r}]", interval, run.state), delay, of_set)
            for of_set, interval in self._eval_intervals.items()
            if interval is not None
        ]
        # Ranks count alike and need not agree; their clocks differ.
        self._counted = [request for request in requests if not request.trigger.is_timed]
        self._timed = [request for request in requests if request.trigger.is_timed] if run.is_main_process else []

    def ask(self, run: Run) -> None:
        """Make the requests that are due after this update."""
        for request in self._counted:
            if request.trigger.is_due(run.state):
                request.make(run, run.control.agree)
        for request in self._timed:
            if request.trigger.is_due(run.state):
                request.make(run, run.control.ask)
        if self._limit is not None and self._clock.seconds >= self._limit:
            run.control.reason = "max_time is over"
            run.control.stop = True
        self._deadline.end_step()


def _trigger(option: str, interval: Every, state: RunState) -> Trigger:
    if interval.unit == "epochs" and interval.amount != int(interval.amount) and not state.steps_per_epoch:
        raise ConfigurationError(
            f'{option}="{interval}" needs the length of an epoch, which is unknown for this data. Give whole epochs, '
            "or steps."
        )
    trigger = Trigger(interval)
    trigger.begin(state)
    return trigger
