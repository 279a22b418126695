"""Downsampling of long curves that keeps minimum, maximum and gaps of each stretch."""

from typing import Any

import numpy as np

_KEPT_OF_STRETCH = 5  # first, last, lowest, highest, and one nonfinite value


def thin(values: Any, at_most: int) -> Any:
    """Return the indices of the values to keep.

    The minimum and the maximum are always kept, and so is each interruption by NaN or Inf, even of a single value.

    Args:
        values: The values, in order.
        at_most: The largest number of values to keep.

    Example:
        >>> values = np.zeros(1_000_000)
        >>> values[[123_456, 654_321]] = 1.0, np.nan
        >>> kept = thin(values, at_most=1000)
        >>> len(kept) <= 1000, 123_456 in kept, 654_321 in kept
        (True, True, True)
    """
    values = np.asarray(values, dtype=float)
    count = len(values)
    if count <= at_most:
        return np.arange(count)
    stretches, padding = _stretches(values, at_most // _KEPT_OF_STRETCH)
    length = stretches.shape[1]
    is_number = np.isfinite(stretches)
    starts = np.arange(len(stretches)) * length
    ends = np.minimum(starts + length, count) - 1
    lowest = starts + np.where(is_number, stretches, np.inf).argmin(axis=1)
    highest = starts + np.where(is_number, stretches, -np.inf).argmax(axis=1)
    is_number[-1, length - padding :] = True  # padding is not an interruption
    broken = starts + (~is_number).argmax(axis=1)
    kept = np.unique(np.concatenate([starts, ends, lowest, highest, broken]))
    return kept[kept < count]


def means(values: Any, at_most: int) -> Any:
    """Return the mean of the finite values of each stretch; nan for a stretch without any."""
    stretches, _ = _stretches(np.asarray(values, dtype=float), at_most)
    is_number = np.isfinite(stretches)
    counts = is_number.sum(axis=1)
    sums = np.where(is_number, stretches, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(stretches), np.nan), where=counts > 0)


def _stretches(values: Any, number: int) -> tuple[Any, int]:
    """Return the values as stretches of equal length, padded with nan, and the amount of padding."""
    length = max(-(-len(values) // max(number, 1)), 1)
    padding = -len(values) % length
    return np.pad(values, (0, padding), constant_values=np.nan).reshape(-1, length), padding
