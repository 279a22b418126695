"""Readable numbers, durations and values."""

import math
from collections.abc import Mapping
from typing import Any


def short(value: Any) -> str:
    """Return a value as short text.

    Example:
        >>> short(0.00012345678), short(1234567.0), short(12), short([1, 2]), short(None)
        ('0.0001235', '1,234,567', '12', '1, 2', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(short(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {short(item)}" for name, item in value.items())
    return str(value)


def duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration(0.27), duration(42.3), duration(754), duration(7384), duration(90000)
        ('0.3 s', '42 s', '12 min 34 s', '2 h 3 min', '1 d 1 h')
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, length, part, part_length in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            rest = int(seconds % length) // part_length
            return f"{int(seconds) // length} {unit}" + (f" {rest} {part}" if rest else "")
    raise AssertionError(seconds)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as flat text values with dotted names.

    Example:
        >>> flat({"lr": 0.1, "fsdp": {"offload": True}})
        {'lr': '0.1', 'fsdp.offload': 'True'}
    """
    flattened: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened.update(flat(value, f"{prefix}{name}."))
        else:
            flattened[f"{prefix}{name}"] = value if isinstance(value, str) else repr(value)
    return flattened
