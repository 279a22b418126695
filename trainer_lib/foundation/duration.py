"""This file is time as people say it: "500 steps", "1 epoch", "10 minutes"."""

import re
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, get_args

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

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
_SHORT = {"s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "d": "day"}
# Commas stand between thousands only: "1,5 epochs" is one and a half to many people, and is refused.
_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
# "1M tokens", with a space behind the letter: "10m" is minutes to some people.
_SPELLED = re.compile(rf"({_NUMBER})\s*(?:([kKMGBT])\s+)?([a-zA-Z]+)")
_THOUSANDS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_WHOLE = ("steps", "samples", "tokens")
_CLOCK = re.compile(r"(?:([0-9]+)[-:])?([0-9]{1,2}):([0-5][0-9]):([0-5][0-9])")


@dataclass(frozen=True)
class Every:
    """An amount of training, of one unit.

    Args:
        amount: How much; more than nothing, and whole for steps, samples and tokens.
        unit: Of what: "steps", "epochs", "samples", "tokens" or "seconds".

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
        """Return what `value` means: a text, a number of steps, a `timedelta`, or an `Every` as it is.

        Times may also be given as a scheduler writes them: "02:30:00", "1-02:30:00".

        Args:
            value: What was given.
            field: The name of the option, for the error.

        Raises:
            ConfigurationError: If it is none of these, or not more than nothing.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, timedelta):
            return cls(_amount(value.total_seconds(), "seconds", value, field), "seconds")
        if isinstance(value, Real) and not isinstance(value, bool):
            return cls(_amount(float(value), "steps", value, field), "steps")
        if isinstance(value, str):
            return cls._read(value, field)
        raise _no_amount(value, field)

    @classmethod
    def _read(cls, text: str, field: str) -> "Every":
        if clock := _CLOCK.fullmatch(text.strip()):
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            return cls(_amount(total, "seconds", text, field), "seconds")
        spelled = _SPELLED.fullmatch(text.strip())
        if spelled is None:
            raise _no_amount(text, field)
        number, thousands, word = spelled.groups()
        try:
            amount = float(number.replace(",", ""))
        except ValueError:  # no digits, as in "epochs", or "1__0 steps"
            raise _no_amount(text, field) from None
        unit, factor = _unit(word, text, field)
        if thousands:  # 1.1 times a million is a little more than that
            amount = round(amount * _THOUSANDS[thousands], 6)
        return cls(_amount(amount * factor, unit, text, field), unit)

    def __str__(self) -> str:
        """Return it as `parse` reads it."""
        return f"{self.amount} {self.unit[:-1] if self.amount == 1 else self.unit}"


def _amount(amount: float, unit: Unit, given: Any, field: str) -> float:
    """Return the amount, whole where it is, or say why it is none."""
    if not 0 < amount < float("inf"):
        raise ConfigurationError(f"{field}={shown(given)} must be more than nothing, and finite.")
    if amount == int(amount):
        return int(amount)
    if unit in _WHOLE:
        raise ConfigurationError(f"{field}={shown(given)}: there are no parts of {unit}. Give a whole number.")
    return amount


def _unit(word: str, given: str, field: str) -> tuple[Unit, int]:
    lower = word.lower()
    singular = lower if lower in _SHORT else lower.removesuffix("s")
    name = _SHORT.get(singular, singular)
    if name not in _UNITS:
        known = [f"{one}s" for one in _UNITS]
        raise ConfigurationError(
            f"{field}={shown(given)}: unknown unit {word!r}. Known: {', '.join(known)}.{did_you_mean(word, known)}"
        )
    return _UNITS[name]


def _no_amount(value: Any, field: str) -> ConfigurationError:
    return ConfigurationError(
        f'{field}={shown(value)} is no amount of training. Give a number and a unit, such as "500 steps", "1 epoch", '
        '"100_000 samples", "1M tokens" or "10 minutes".'
    )
