"""Callbacks made of functions, and filters that pass a callback only some updates.

A filter passes the events of an update (`Event.per_update`) or withholds them; it passes all other events. An amount is
anything `Every.parse` reads. Amounts of time use the clock of each rank, and clocks differ: with them, only set
requests in `run.control`, which reach all ranks, and never call a collective.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.events.callback import EVENTS, UpdatePlan, overrides
from trainer_lib.events.trigger import Trigger, callback_trigger
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError

_OWN = ("__signature__", "order", "key", "may_change_training", "reads_outputs")  # a filter has its own
# What a callback declares of itself, which holds behind a filter too.
_DECLARED = [name for name in Callback.__annotations__ if name not in _OWN]


class LambdaCallback(Callback):
    """Calls functions at events.

    Args:
        order: Callbacks of a lower order are called first.
        **functions: A function for each event, with the arguments of the event's method except `self`.

    Example:
        >>> callback = LambdaCallback(on_step_end=lambda run: print("step", run.state.step))
        >>> callback.on_step_end(Run())
        step 0
    """

    def __init__(self, *, order: int = 0, **functions: Callable[..., Any]) -> None:
        self.order = order
        for event, function in functions.items():
            if event not in EVENTS:
                from trainer_lib.events.foreign_events import instead_of

                known = ", ".join(EVENTS)
                raise ConfigurationError(f"Unknown event {event!r}.{instead_of(event, EVENTS)} Known: {known}.")
            if not callable(function):
                raise ConfigurationError(f"LambdaCallback({event}) must be a function (got {function!r}).")
            setattr(self, event, function)


def every(amount: Any, listener: Callable[[Run], Any] | Callback) -> Callback:
    """Return a callback that runs once every `amount` of training.

    Args:
        amount: How often: "100 steps", "1 epoch", "10 minutes" …
        listener: A function of the run, called at the end of the update that reaches the amount; or a callback, which
            gets the events of that update. For samples and time the update is known only at its end, so a callback
            gets the events of the next update.

    Example:
        >>> from trainer_lib.events import RunState
        >>> report = every("100 steps", lambda run: print("step", run.state.step))
        >>> for step in range(1, 301):
        ...     report.on_step_end(Run(state=RunState(step=step)))
        step 100
        step 200
        step 300
    """
    return _filtered(callback_trigger(amount, "every", "every"), listener)


def once(amount: Any, listener: Callable[[Run], Any] | Callback) -> Callback:
    """Return a callback that runs once, when `amount` of training is reached; see `every`.

    Example:
        >>> save_early = once("10 minutes", lambda run: setattr(run.control, "save", True))
    """
    return _filtered(callback_trigger(amount, "once", "once"), listener)


def after(amount: Any, listener: Callable[[Run], Any] | Callback) -> Callback:
    """Return a callback that runs in each update after `amount` of training; see `every`.

    Example:
        >>> late = after("1 epoch", every(10, lambda run: print(run.state.step)))
    """
    return _filtered(callback_trigger(amount, "after", "after"), listener)


def before(amount: Any, listener: Callable[[Run], Any] | Callback) -> Callback:
    """Return a callback that runs in each update before `amount` of training is reached; see `every`.

    Example:
        >>> early = before("1000 steps", lambda run: print(run.state.step))
    """
    return _filtered(callback_trigger(amount, "before", "before"), listener)


class _Function(Callback):
    """A function, called when all triggers are due."""

    def __init__(self, function: Callable[[Run], Any], triggers: tuple[Trigger, ...]) -> None:
        self.listener, self.triggers = function, triggers
        self.key = f"{getattr(function, '__name__', type(function).__name__)}()"

    def on_fit_begin(self, run: Run) -> None:
        for trigger in self.triggers:
            trigger.begin(run.state)

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        self.on_fit_begin(run)  # a rewind goes back to an earlier step

    def on_step_end(self, run: Run) -> None:
        answers = [trigger.is_due(run.state) for trigger in self.triggers]  # no short-circuit: each trigger counts
        if all(answers):
            self.listener(run)

    def on_epoch_end(self, run: Run) -> None:
        if any(trigger.is_past_update(run.state) for trigger in self.triggers):
            self.on_step_end(run)


class _Filtered(Callback):
    """A callback that gets the events of an update when all triggers are due."""

    def __init__(self, callback: Callback, triggers: tuple[Trigger, ...]) -> None:
        self.listener, self.triggers = callback, triggers
        self.order, self.key = callback.order, callback.key or type(callback).__name__
        for name in _DECLARED:
            setattr(self, name, getattr(callback, name))
        self._has_begun = self._is_due = False
        self._loaded: dict[str, float] = {}
        self._loaded_own: dict[str, float] = {}  # of the callback's own triggers
        for name, event in EVENTS.items():
            if overrides(callback, name) and not overrides(self, name):
                handler = getattr(callback, name)
                setattr(self, name, self._if_due(handler) if event.per_update else handler)

    @property
    def unfiltered(self) -> Callback:
        """The callback behind the filter."""
        return self.listener.unfiltered

    @property
    def monitored_metric(self) -> str | None:
        """That of the callback, which hears of all evaluations."""
        return self.listener.monitored_metric

    @property
    def save_interval(self) -> Every | None:
        """That of the callback."""
        return self.listener.save_interval

    @property
    def tracker_name(self) -> str | None:
        """That of the callback."""
        return self.listener.tracker_name

    def update_plan(self) -> UpdatePlan | None:
        """Return that of the callback."""
        return self.listener.update_plan()

    def on_fit_begin(self, run: Run) -> None:
        for trigger in self.triggers:
            trigger.begin(run.state)
        if run.state.step:  # no new run, for which a state may be left from one before
            self._set_positions(self._loaded)
        self.listener.on_fit_begin(run)
        if run.state.step:
            self._set_own_positions()

    def on_load_end(self, run: Run, folder: Path) -> None:
        self._has_begun = self._is_due = False  # a rewind breaks off an update
        self.listener.on_load_end(run, folder)
        self._set_own_positions()

    def on_step_begin(self, run: Run) -> None:
        self._begin_update(run)
        if self._is_due:
            self.listener.on_step_begin(run)

    def on_step_skipped(self, run: Run) -> None:
        if not self._has_begun:  # an update whose samples a rewind leaves out
            self._begin_update(run)
        if self._is_due:
            self.listener.on_step_skipped(run)

    def on_step_end(self, run: Run) -> None:
        if self._is_due:
            self.listener.on_step_end(run)
        self._has_begun = self._is_due = False

    def state_dict(self) -> dict[str, Any]:
        state = self.listener.state_dict()
        # Whether an update reached one of these is known from the position before it.
        positions = {str(t.amount): t.done for t in self.triggers if t.amount.unit in ("samples", "epochs")}
        # The callback's own triggers last looked at an update that reached it.
        own = {name: trigger.done for name, trigger in self._own_triggers().items()}
        return {"positions": positions, "own": own, "callback": state} if positions or own else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "positions" in state:
            self._loaded, self._loaded_own = dict(state["positions"]), dict(state.get("own", {}))
            self._set_positions(self._loaded)
            state = state["callback"]
        if state:
            self.listener.load_state_dict(state)

    def _begin_update(self, run: Run) -> None:
        answers = [trigger.is_due_next(run.state) for trigger in self.triggers]  # no short-circuit: each trigger counts
        self._has_begun, self._is_due = True, all(answers)

    def _set_positions(self, positions: Mapping[str, float]) -> None:
        for trigger in self.triggers:
            trigger.done = positions.get(str(trigger.amount), trigger.done)

    def _own_triggers(self) -> dict[str, Trigger]:
        return {name: value for name, value in vars(self.listener).items() if isinstance(value, Trigger)}

    def _set_own_positions(self) -> None:
        for name, trigger in self._own_triggers().items():
            trigger.done = self._loaded_own.get(name, trigger.done)

    def _if_due(self, handler: Callable[[Run], None]) -> Callable[[Run], None]:
        def handle(run: Run) -> None:
            if self._is_due:
                handler(run)

        return handle


class _FilteredModifier(_Filtered, Modifier):
    """A filtered modifier."""

    def eval_weights(self, run: Run) -> AbstractContextManager[Any]:
        assert isinstance(self.listener, Modifier)
        return self.listener.eval_weights(run)


def _filtered(trigger: Trigger, listener: Callable[[Run], Any] | Callback) -> Callback:
    if isinstance(listener, (_Function, _Filtered)):
        kind, listener, triggers = type(listener), listener.listener, (trigger, *listener.triggers)
        return kind(listener, triggers)  # type: ignore[arg-type]  # the class fits its own listener
    if isinstance(listener, Callback):
        return (_FilteredModifier if listener.may_change_training else _Filtered)(listener, (trigger,))
    if isinstance(listener, type) or not callable(listener):
        raise ConfigurationError(f"A filter needs a function of the run or a callback (got {listener!r}).")
    return _Function(listener, (trigger,))
