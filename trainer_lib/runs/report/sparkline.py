"""Sparklines: a curve in one line of text."""

import math
from collections.abc import Sequence
from typing import Any, TextIO

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return a curve as bars, each the mean of an equal number of values.

    Example:
        >>> sparkline([1, 2, 3, 5, 8])
        '▁▂▃▅█'
    """
    stretch = max(len(values) / width, 1.0)
    count = round(len(values) / stretch)
    parts = [values[round(index * stretch) : round((index + 1) * stretch)] for index in range(count)]
    heights = [_mean(part) for part in parts]
    known = [height for height in heights if height is not None]
    if not known:
        return ""
    low, size = min(known), (max(known) - min(known)) or 1.0
    return "".join(
        " " if height is None else _BARS[round((height - low) / size * (len(_BARS) - 1))] for height in heights
    )


def shows_sparklines(file: TextIO | Any) -> bool:
    """Whether a text file is a terminal that can show the bars."""
    try:
        _BARS.encode(file.encoding or "ascii")
        return file.isatty()
    except (UnicodeError, LookupError, AttributeError, ValueError):
        return False


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None
