"""Triggers: whether something is due after an update, by an amount of training."""

import math
import time
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

from trainer_lib.events.run_state import RunState
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError

When = Literal["every", "once", "after", "before"]

_COUNTS = {"steps": "step", "epochs": "epochs", "samples": "samples", "tokens": "tokens"}
_TINY = 1e-9  # tolerance for the rounding error of a sum of fractions of an epoch


class Trigger:
    """Tells for each update whether something is due.

    Args:
        amount: An amount of training; time is measured by the clock of this rank, and counts the time before a resume.
        when: "every": at each update that reaches another multiple of the amount; "once": at the first that reaches it;
            "after" and "before": at each update after the amount, or before it.

    Attributes:
        done: How much of the amount was done after the last update: 2.5 of it, for example.

    Example:
        >>> trigger, state = Trigger(Every.parse("3 steps")), RunState()
        >>> for state.step in range(1, 8):
        ...     if trigger.is_due(state):
        ...         print(state.step)
        3
        6
    """

    amount: Every

    def __init__(self, amount: Every, when: When = "every") -> None:
        self.amount, self._when = amount, when
        self._rounding = _TINY if amount.unit == "epochs" else 0.0
        position: Callable[[Any], float] = self._seconds if self.is_timed else attrgetter(_COUNTS[amount.unit])
        self._position = position
        self.done: float = self._rounding
        self._began = time.monotonic()

    @property
    def is_timed(self) -> bool:
        """Whether it measures time, so that ranks may get different answers."""
        return self.amount.unit == "seconds"

    def begin(self, state: RunState) -> None:
        """Record the position at which training begins or resumes."""
        self._began = time.monotonic() - state.seconds
        self.done = self._of_amount(state)

    def is_due(self, state: RunState) -> bool:
        """Whether the update that ends is due; call it once per update."""
        before, done = self.done, self._position(state) / self.amount.amount + self._rounding
        self.done = done
        match self._when:
            case "every":
                return math.floor(done) > math.floor(before)
            case "once":
                return before < 1 <= done
            case "after":
                return done > 1 + 2 * self._rounding
            case _:
                return done < 1

    def is_due_next(self, state: RunState) -> bool:
        """Whether the update that begins is due; call it once per update.

        For samples and time, this is known only at its end: the update after it is due then.
        """
        if self.amount.unit == "steps":
            ahead: Any = SimpleNamespace(step=state.step + 1)
        elif self.amount.unit == "epochs" and state.steps_per_epoch:
            ahead = SimpleNamespace(epochs=state.epoch + (state.steps_in_epoch + 1) / state.steps_per_epoch)
        else:
            return self.is_due(state)
        self.done = self._of_amount(state)
        return self.is_due(ahead)

    def progress(self, state: RunState) -> float:
        """Return the fraction of the amount that is reached, 1 at most."""
        return min(1.0, self._position(state) / self.amount.amount + _TINY)

    def is_reached(self, state: RunState) -> bool:
        """Whether the amount is reached."""
        return self._of_amount(state) >= 1

    def is_past_update(self, state: RunState) -> bool:
        """Whether the end of an epoch moved the position past that of its last update: its length was not known."""
        is_by_update = self._when in ("after", "before")
        return not is_by_update and self.amount.unit == "epochs" and self._of_amount(state) > self.done

    def _of_amount(self, state: RunState) -> float:
        return self._position(state) / self.amount.amount + self._rounding

    def _seconds(self, state: Any) -> float:
        del state
        return time.monotonic() - self._began


def callback_trigger(amount: Any, option: str, when: When = "every", may_be_time: bool = True) -> Trigger:
    """Return the trigger of a callback's option.

    Args:
        amount: An amount such as "100 steps", or a number of steps.
        option: The name of the option, for errors.
        when: See `Trigger`.
        may_be_time: Whether ranks may get different answers.

    Raises:
        ConfigurationError: If it is not an amount of training, or not one that the callback can use.
    """
    parsed = Every.parse(amount, option)
    if parsed.unit == "tokens":
        raise ConfigurationError(
            f'{option}="{parsed}" must be in steps, epochs, samples or time: callbacks do not count tokens. '
            "Only max_tokens, log_every, eval_every and save_every take tokens."
        )
    if parsed.unit == "seconds" and not may_be_time:
        raise ConfigurationError(
            f"{option} must not be an amount of time, since clocks differ between ranks (got {amount!r}). Give steps, "
            "epochs or samples."
        )
    return Trigger(parsed, when)
