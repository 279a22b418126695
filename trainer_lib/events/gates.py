"""This file is which updates are meant by an amount of training: every, once, after, before."""

import math
import time
from typing import Any

from trainer_lib.events.run_state import RunState
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError

_TINY = 1e-9  # what a sum of parts of an epoch may be off by


class Gate:
    """Whether an update is one of those meant.

    Args:
        amount: An amount of training; one of time goes by the clock of this process.
        field: What the option is called, for errors.
    """

    def __init__(self, amount: Any, field: str) -> None:
        self._every = Every.parse(amount, field)
        if self._every.unit == "tokens":
            raise ConfigurationError(
                f'{field}="{self._every}": callbacks count steps, epochs, samples and time. Tokens are counted for '
                "max_tokens, log_every, eval_every and save_every."
            )
        self._amount = float(self._every.amount)
        self._position = 0.0
        self._began = time.monotonic()

    @property
    def is_timed(self) -> bool:
        """Whether it goes by a clock, so that processes may come to different answers."""
        return self._every.unit == "seconds"

    def begin(self, state: RunState) -> None:
        """Take note of where training begins, or goes on."""
        self._began = time.monotonic() - state.seconds
        self._position = self._now(state)

    def opens_at_end(self, state: RunState) -> bool:
        """Whether the update that is made is one; asked once an update."""
        begun, self._position = self._position, self._now(state)
        return self._opens(begun, self._position)

    def opens_at_begin(self, state: RunState) -> bool:
        """Whether the update that begins is one; asked once an update."""
        if self._every.unit == "steps":
            return self._opens(state.step, state.step + 1)
        if self._every.unit == "epochs" and state.steps_per_epoch:
            return self._opens(state.epochs, state.epoch + (state.steps_in_epoch + 1) / state.steps_per_epoch)
        return self.opens_at_end(state)

    def progress(self, state: RunState) -> float:
        """Return which part of the amount is reached, 1 at most."""
        return min(1.0, self._now(state) / self._amount + _TINY)

    def is_reached(self, state: RunState) -> bool:
        """Whether the amount is reached."""
        return self.progress(state) >= 1

    def has_passed(self, state: RunState) -> bool:
        """Whether the end of a pass moved what the end of its last update did not: its length was not known."""
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
    """The updates with which another such amount is reached."""

    def _opens(self, begun: float, ended: float) -> bool:
        return math.floor(ended / self._amount + _TINY) > math.floor(begun / self._amount + _TINY)


class OnceAmount(Gate):
    """The one update with which the amount is reached."""

    def _opens(self, begun: float, ended: float) -> bool:
        return begun + _TINY < self._amount <= ended + _TINY


class AfterAmount(Gate):
    """The updates after it is reached."""

    def _opens(self, begun: float, ended: float) -> bool:
        return ended > self._amount + _TINY


class BeforeAmount(Gate):
    """The updates before the one with which it is reached."""

    def _opens(self, begun: float, ended: float) -> bool:
        return ended < self._amount - _TINY
