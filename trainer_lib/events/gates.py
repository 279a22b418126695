"""Gates that select updates by an amount of training: every, once, after, before."""

import math
import time
from typing import Any

from trainer_lib.events.run_state import RunState
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError

_TINY = 1e-9  # tolerance for the rounding error of a sum of fractions of an epoch


class Gate:
    """Tells for each update whether it is selected.

    Args:
        amount: An amount of training, such as "100 steps"; an amount of time is measured by the clock of this rank.
        field: The name of the option in errors.
    """

    def __init__(self, amount: Any, field: str) -> None:
        self._every = Every.parse(amount, field)
        if self._every.unit == "tokens":
            raise ConfigurationError(
                f'{field}="{self._every}" must be in steps, epochs, samples or time: callbacks do not count tokens. '
                "Only max_tokens, log_every, eval_every and save_every take tokens."
            )
        self._amount = float(self._every.amount)
        self._position = 0.0
        self._began = time.monotonic()

    @property
    def is_timed(self) -> bool:
        """Whether the gate measures time, so that ranks may get different answers."""
        return self._every.unit == "seconds"

    def begin(self, state: RunState) -> None:
        """Record the position at which training begins or resumes."""
        self._began = time.monotonic() - state.seconds
        self._position = self._now(state)

    def opens_at_end(self, state: RunState) -> bool:
        """Whether the update that ends is selected; call it once per update."""
        begun, self._position = self._position, self._now(state)
        return self._opens(begun, self._position)

    def opens_at_begin(self, state: RunState) -> bool:
        """Whether the update that begins is selected; call it once per update."""
        if self._every.unit == "steps":
            return self._opens(state.step, state.step + 1)
        if self._every.unit == "epochs" and state.steps_per_epoch:
            return self._opens(state.epochs, state.epoch + (state.steps_in_epoch + 1) / state.steps_per_epoch)
        return self.opens_at_end(state)

    def progress(self, state: RunState) -> float:
        """Return the fraction of the amount that is reached, 1 at most."""
        return min(1.0, self._now(state) / self._amount + _TINY)

    def is_reached(self, state: RunState) -> bool:
        """Whether the amount is reached."""
        return self.progress(state) >= 1

    def has_passed(self, state: RunState) -> bool:
        """Whether the end of an epoch moved the position past that of its last update: its length was not known."""
        return self._every.unit == "epochs" and self._now(state) > self._position

    def _opens(self, begun: float, ended: float) -> bool:
        raise NotImplementedError

    def _now(self, state: RunState) -> float:
        match self._every.unit:
            case "steps":
                return state.step
            case "epochs":
                return state.epochs
            case "seconds":
                return time.monotonic() - self._began
            case _:
                return state.samples


class EveryAmount(Gate):
    """Selects each update that reaches another multiple of the amount."""

    def _opens(self, begun: float, ended: float) -> bool:
        return math.floor(ended / self._amount + _TINY) > math.floor(begun / self._amount + _TINY)


class OnceAmount(Gate):
    """Selects the one update that reaches the amount."""

    def _opens(self, begun: float, ended: float) -> bool:
        return begun + _TINY < self._amount <= ended + _TINY


class AfterAmount(Gate):
    """Selects the updates after the amount is reached."""

    def _opens(self, begun: float, ended: float) -> bool:
        return ended > self._amount + _TINY


class BeforeAmount(Gate):
    """Selects the updates before the one that reaches the amount."""

    def _opens(self, begun: float, ended: float) -> bool:
        return ended < self._amount - _TINY
