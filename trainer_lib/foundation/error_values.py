"""Values formatted for error messages: short, on one line, tensors and arrays by their shape."""

from itertools import islice
from math import prod
from reprlib import Repr
from typing import Any

_LONGEST = 120


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 8
        self.maxstring = self.maxother = self.maxlong = _LONGEST

    def repr1(self, x: Any, level: int) -> str:
        kind, shape = type(x), getattr(x, "shape", None)
        if isinstance(x, type):
            return super().repr1(x, level)
        if isinstance(shape, tuple) and prod(shape) > 4:
            return f"<{kind.__name__} of shape {tuple(shape)}>"
        # The representation of a module is long; the default representation of an object is an address.
        if hasattr(x, "named_parameters") or kind.__repr__ is object.__repr__:
            return f"<{kind.__name__}>"
        return super().repr1(x, level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return the representation of a value on one line of at most 120 characters.

    Example:
        >>> shown("auto"), shown([0] * 100)
        ("'auto'", '[0, 0, 0, 0, 0, 0, 0, 0, ...]')
        >>> import numpy
        >>> shown((numpy.zeros((8, 3)), numpy.zeros(8)))
        '(<ndarray of shape (8, 3)>, <ndarray of shape (8,)>)'
    """
    try:
        text = " ".join(_SHORT.repr(value).splitlines())
    except Exception:  # noqa: BLE001 - the error message must appear even if the value has no representation
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
