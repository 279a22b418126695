"""Durations such as "500 steps", "1 epoch" or "10 minutes"."""

import re
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, get_args

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

NEVER = "never"  # turns an interval off

Unit = Literal["steps", "epochs", "samples", "tokens", "seconds"]

_UNITS: dict[str, tuple[Unit, int]] = {
    "step": ("steps", 1),
    "epoch": ("epochs", 1),
    "sample": ("samples", 1),
    "token": ("tokens", 1),
    "second": ("seconds", 1),
    "minute": ("seconds", 60),
    "hour": ("seconds", 3600),
    "day": ("seconds", 86400),
}
_OF_COMPOSER = {"ep": "epochs", "ba": "steps", "iter": "steps", "sp": "samples", "tok": "tokens"}
_SHORT = {"s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "d": "day"}
# Commas separate thousands only: "1,5 epochs" means one and a half in many countries, and is refused.
_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
# "1M tokens" needs the space after the letter, because "10m" could mean minutes.
_SPELLED = rf"({_NUMBER})\s*(?:([kKMGBT])\s+)?([a-zA-Z]+)"
_THOUSANDS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_WHOLE = ("steps", "samples", "tokens")
_CLOCK = r"(?:([0-9]+)[-:])?([0-9]{1,2}):([0-5][0-9]):([0-5][0-9])"


@frozen_dataclass
class Every:
    """An amount of training, of one unit.

    Args:
        amount: The amount; more than 0, and whole for steps, samples and tokens.
        unit: The unit: "steps", "epochs", "samples", "tokens" or "seconds".

    Example:
        >>> Every.parse("500 steps"), Every.parse("10 minutes")
        (Every(amount=500, unit='steps'), Every(amount=600, unit='seconds'))
        >>> str(Every.parse(100)), str(Every.parse("2M tokens"))
        ('100 steps', '2000000 tokens')
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        """Check the amount and the unit."""
        if self.unit not in get_args(Unit):
            known = get_args(Unit)
            raise ConfigurationError(
                f"Every: unknown unit {self.unit!r}. Known: {', '.join(known)}.{did_you_mean(self.unit, known)}"
            )
        object.__setattr__(self, "amount", _amount(self.amount, self.unit, self.amount, "amount"))

    @classmethod
    def parse(cls, value: Any, field: str = "every") -> "Every":
        """Return the duration of a string, a number of steps, a `timedelta` or an `Every`.

        Times may also have the format of SLURM: "02:30:00", "1-02:30:00".

        Args:
            value: The value to parse.
            field: The name of the option, for errors.

        Raises:
            ConfigurationError: If it is not a duration, or not more than 0.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, timedelta):
            return cls(_amount(value.total_seconds(), "seconds", value, field), "seconds")
        if isinstance(value, Real) and not isinstance(value, bool):
            return cls(_amount(float(value), "steps", value, field), "steps")
        if isinstance(value, str):
            return cls._read(value, field)
        raise _not_a_duration(value, field)

    @classmethod
    def _read(cls, text: str, field: str) -> "Every":
        if clock := re.fullmatch(_CLOCK, text.strip()):
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            return cls(_amount(total, "seconds", text, field), "seconds")
        spelled = re.fullmatch(_SPELLED, text.strip())
        if spelled is None:
            raise _not_a_duration(text, field)
        number, thousands, word = spelled.groups()
        try:
            amount = float(number.replace(",", ""))
        except ValueError:  # no digits, as in "epochs", or "1__0 steps"
            raise _not_a_duration(text, field) from None
        unit, factor = _unit(word, text, field)
        if thousands:  # 1.1 * 10**6 is not exactly 1100000
            amount = round(amount * _THOUSANDS[thousands], 6)
        return cls(_amount(amount * factor, unit, text, field), unit)

    def __str__(self) -> str:
        """Return the string that `parse` reads."""
        return f"{self.amount} {self.unit[:-1] if self.amount == 1 else self.unit}"


def _amount(amount: float, unit: Unit, given: Any, field: str) -> float:
    """Return the amount, as an integer if it is whole, or raise if it is not valid."""
    if not 0 < amount < float("inf"):
        raise ConfigurationError(f"{field}={shown(given)} must be more than 0, and finite.")
    if amount == int(amount):
        return int(amount)
    if unit in _WHOLE:
        part = f' For a part of an epoch, give "{given} epochs".' if unit == "steps" and given == amount else ""
        raise ConfigurationError(f"{field}={shown(given)} must be a whole number of {unit}.{part}")
    return amount


def _unit(word: str, given: str, field: str) -> tuple[Unit, int]:
    lower = word.lower()
    singular = lower if lower in _SHORT else lower.removesuffix("s")
    name = _SHORT.get(singular, singular)
    if name not in _UNITS:
        known = [f"{unit}s" for unit in _UNITS]
        hint = f" Did you mean {_OF_COMPOSER[word]!r}?" if word in _OF_COMPOSER else did_you_mean(word, known)
        raise ConfigurationError(f"{field}={shown(given)}: unknown unit {word!r}. Known: {', '.join(known)}.{hint}")
    return _UNITS[name]


def _not_a_duration(value: Any, field: str) -> ConfigurationError:
    return ConfigurationError(
        f'{field}={shown(value)} is not a duration. Give a number and a unit, such as "500 steps", "1 epoch", '
        '"100_000 samples", "1M tokens" or "10 minutes".'
    )
