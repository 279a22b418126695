"""Sizes in bytes as strings: formatting and parsing "10GB"."""

import math
import re

from trainer_lib.foundation.errors import ConfigurationError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1.

    Example:
        >>> convert_bytes(123_456_789)
        '117.74 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: float | str) -> int:
    """Return the bytes of a size such as "10GB", "5MiB" or "512"; a number counts bytes, rounded down.

    Units are powers of 1000, or of 1024 with an "i"; "Gb" with a lower-case b is bits.

    Example:
        >>> convert_file_size_to_int("5MB"), convert_file_size_to_int("1MiB")
        (5000000, 1048576)
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and 0 <= size < math.inf:
        return int(size)
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if parts is None or parts[2].upper() not in _UNITS:
        raise ConfigurationError(
            f"{size!r} is not a size. Give bytes as a number, or a string such as '10GB', '500MB' or '5GiB'."
        )
    in_bits = len(parts[2]) == 2 and parts[2].endswith("b")
    return int(float(parts[1]) * _UNITS[parts[2].upper()]) // (8 if in_bits else 1)
