"""This file is time as people say it: "500 steps", "1 epoch", "10 minutes"."""

import re
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Any, Literal

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

Unit = Literal["steps", "epochs", "samples", "seconds"]

_UNITS: dict[str, tuple[Unit, float]] = {
    "step": ("steps", 1),
    "epoch": ("epochs", 1),
    "sample": ("samples", 1),
    "second": ("seconds", 1),
    "minute": ("seconds", 60),
    "hour": ("seconds", 3600),
    "day": ("seconds", 86400),
}
_SPELLED = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]+)\s*")
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d{1,2}):(\d{2}):(\d{2})")


@dataclass(frozen=True)
class Every:
    """An amount of training, of one unit.

    Example:
        >>> Every.parse("500 steps"), Every.parse("10 minutes")
        (Every(amount=500, unit='steps'), Every(amount=600, unit='seconds'))
        >>> str(Every.parse(100))
        '100 steps'
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, value: Any, field: str = "every") -> "Every":
        """Return what `value` means: a text, a number of steps, a `timedelta`, or an `Every` as it is.

        Args:
            value: What was given.
            field: The name of the option, for the error.

        Raises:
            ConfigurationError: If it is none of these, or not more than nothing.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, timedelta):
            return cls._positive(value.total_seconds(), "seconds", value, field)
        if isinstance(value, Real) and not isinstance(value, bool):
            return cls._positive(float(value), "steps", value, field)
        if isinstance(value, str):
            if clock := _CLOCK.fullmatch(value.strip()):
                days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
                total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
                return cls._positive(total, "seconds", value, field)
            if spelled := _SPELLED.fullmatch(value):
                number, word = spelled.groups()
                unit, factor = _unit(word, value, field)
                return cls._positive(float(number.replace("_", "").replace(",", "")) * factor, unit, value, field)
        raise ConfigurationError(
            f'{field}={value!r} is no amount of training. Give a number and a unit, such as "500 steps", "1 epoch", '
            '"100_000 samples" or "10 minutes".'
        )

    @classmethod
    def _positive(cls, amount: float, unit: Unit, given: Any, field: str) -> "Every":
        if not 0 < amount < float("inf"):
            raise ConfigurationError(f"{field}={given!r} must be more than nothing.")
        if unit in ("steps", "samples"):
            if amount != int(amount):
                raise ConfigurationError(f"{field}={given!r}: there are no parts of {unit}. Give a whole number.")
            amount = int(amount)
        return cls(int(amount) if amount == int(amount) else amount, unit)

    def __str__(self) -> str:
        """Return it as `parse` reads it."""
        return f"{self.amount} {self.unit[:-1] if self.amount == 1 else self.unit}"


def _unit(word: str, given: str, field: str) -> tuple[Unit, float]:
    singular = word.lower().removesuffix("s")
    short = {"min": "minute", "h": "hour", "sec": "second", "": "second"}.get(singular, singular)
    if short not in _UNITS:
        known = ", ".join(f"{name}s" for name in _UNITS)
        raise ConfigurationError(
            f"{field}={given!r}: unknown unit {word!r}. Known: {known}.{did_you_mean(word, [f'{n}s' for n in _UNITS])}"
        )
    return _UNITS[short]
