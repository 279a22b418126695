"""Durations such as "500 steps" and "10 minutes"."""

import re
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError


@pytest.mark.parametrize(
    ("value", "amount", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("  500steps ", 500, "steps"),
        ("1_000 Steps", 1000, "steps"),
        ("10,000 samples", 10_000, "samples"),
        ("1,234,567 samples", 1_234_567, "samples"),
        ("1e6 samples", 1_000_000, "samples"),
        ("1.5e3 samples", 1500, "samples"),
        ("+3 epochs", 3, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        (".25 epoch", 0.25, "epochs"),
        ("2. epochs", 2, "epochs"),
        ("30 seconds", 30, "seconds"),
        ("30s", 30, "seconds"),
        ("30 sec", 30, "seconds"),
        ("1.5 minutes", 90, "seconds"),
        ("2 mins", 120, "seconds"),
        ("0.25 hours", 900, "seconds"),
        ("2h", 7200, "seconds"),
        ("2 hrs", 7200, "seconds"),
        ("2 days", 172_800, "seconds"),
        ("2d", 172_800, "seconds"),
        ("1M tokens", 1_000_000, "tokens"),
        ("1.1 M tokens", 1_100_000, "tokens"),
        ("10B tokens", 10_000_000_000, "tokens"),
        ("1k steps", 1000, "steps"),
        ("2.5K samples", 2500, "samples"),
        ("1 token", 1, "tokens"),
        ("1:02:03", 3723, "seconds"),
        ("99:00:00", 356_400, "seconds"),
        ("1-02:03:04", 93_784, "seconds"),
        ("1:02:03:04", 93_784, "seconds"),
        (100, 100, "steps"),
        (100.0, 100, "steps"),
        (np.int64(100), 100, "steps"),
        (np.float32(100), 100, "steps"),
        (Fraction(100), 100, "steps"),
        (timedelta(minutes=2), 120, "seconds"),
        (timedelta(milliseconds=1500), 1.5, "seconds"),
        (Every(3, "epochs"), 3, "epochs"),
    ],
)
def test_what_is_read(value: Any, amount: float, unit: str) -> None:
    every = Every.parse(value)
    assert (every.amount, every.unit) == (amount, unit)
    assert isinstance(every.amount, int) == (amount == int(amount))


@pytest.mark.parametrize(
    "value",
    [
        "500",
        "",
        "epochs",
        "steps 500",
        "500 steps 3",
        "1,5 epochs",
        "1,50 epochs",
        "1__0 steps",
        "1 000 steps",
        "e5 steps",
        ". steps",
        "- steps",
        "10:00",
        "1:60:00",
        "1:00:60",
        "1-00:00",
        None,
        True,
        b"1 step",
        ["1 step"],
        3j,
    ],
)
def test_what_is_no_amount(value: Any) -> None:
    message = f"save_every={value!r} is not a duration. Give a number and a unit, such as "
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Every.parse(value, "save_every")


@pytest.mark.parametrize(
    "value", [0, -1, "0 steps", "-5 steps", "0:00:00", "1e999 steps", timedelta(0), timedelta(-1), float("nan")]
)
def test_nothing_and_less_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"log_every={value!r} must be more than 0")):
        Every.parse(value, "log_every")


@pytest.mark.parametrize("value", [0.5, "1.5 steps", "0.3 samples"])
def test_there_are_no_parts_of_steps_and_samples(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"log_every={value!r} must be a whole number of s")):
        Every.parse(value, "log_every")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("5 epoks", " Did you mean 'epochs'?"),
        ("5 minuts", " Did you mean 'minutes'?"),
        ("5 stepss", " Did you mean 'steps'?"),
        ("5 m", ""),
        ("5 batches", ""),
    ],
)
def test_unknown_units_are_named_with_the_nearest(value: str, hint: str) -> None:
    word = value.split()[1]
    with pytest.raises(ConfigurationError) as refused:
        Every.parse(value, "eval_every")
    assert str(refused.value) == (
        f"eval_every={value!r}: unknown unit {word!r}. "
        f"Known: steps, epochs, samples, tokens, seconds, minutes, hours, days.{hint}"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1 step"),
        (500, "500 steps"),
        ("0.5 epoch", "0.5 epochs"),
        ("1 hour", "3600 seconds"),
        (timedelta(seconds=1), "1 second"),
        (timedelta(microseconds=1), "1e-06 seconds"),
        ("1e22 samples", "10000000000000000000000 samples"),
    ],
)
def test_it_is_written_as_it_is_read(value: Any, text: str) -> None:
    assert str(Every.parse(value)) == text
    assert Every.parse(text) == Every.parse(value)


def test_made_by_hand_it_is_checked_as_well() -> None:
    assert str(Every(2.0, "steps")) == "2 steps"
    with pytest.raises(ConfigurationError, match="amount=-1 must be more than 0"):
        Every(-1, "steps")
    with pytest.raises(ConfigurationError, match=r"amount=0\.5 must be a whole number of steps"):
        Every(0.5, "steps")
    with pytest.raises(ConfigurationError, match=r"unknown unit 'step'. Known: .* Did you mean 'steps'\?"):
        Every(1, "step")  # type: ignore[arg-type]
