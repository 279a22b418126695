"""This file is sizes in bytes as people read them."""


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit that leaves at least one.

    Example:
        >>> convert_bytes(123_456_789)
        '117.74 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
