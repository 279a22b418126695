"""Dataclasses that cost a fraction of `dataclass` to define, since only `__init__` is compiled for each class.

An `import` of the Trainer defines dozens of dataclasses, and `dataclass` compiles up to six methods for each, a
millisecond in all.
"""

import reprlib
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


class LightDataclass:
    """The base of a `@dataclass(repr=False, eq=False)` whose instances are shown and compared as of any dataclass.

    Examples:
        >>> @dataclass(repr=False, eq=False)
        ... class Options(LightDataclass):
        ...     x: int = 0
        >>> Options(1), Options(1) == Options(1), Options(1) == Options(2)
        (Options(x=1), True, False)
    """

    # Its fields may change.
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        """Return the name of the class, and all fields."""
        if not is_dataclass(self):  # a class derived from a base of options
            return super().__repr__()
        shown = (f"{value.name}={getattr(self, value.name)!r}" for value in fields(self) if value.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal."""
        if other.__class__ is not self.__class__ or not is_dataclass(self):
            return NotImplemented
        names = [value.name for value in fields(self) if value.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(Field, field))
def frozen_dataclass(kind: type[T], /) -> type[T]: ...
@overload
def frozen_dataclass(*, kw_only: bool = False, eq: bool = True) -> Callable[[type[T]], type[T]]: ...
def frozen_dataclass(kind: Any = None, /, *, kw_only: bool = False, eq: bool = True) -> Any:
    """Make a class a dataclass that nobody changes: type checkers refuse assignments, nothing checks them at run time.

    Instances are made faster as well.

    Examples:
        >>> @frozen_dataclass(kw_only=True)
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(x=1), Point(x=1) == Point(x=1, y=0), Point(x=1) == Point(x=2)
        (Point(x=1, y=0), True, False)
    """

    def decorate(kind: Any) -> Any:
        if "__repr__" not in kind.__dict__:
            kind.__repr__ = LightDataclass.__repr__
        kind = dataclass(kind, repr=False, eq=False, kw_only=kw_only)
        if eq:
            _compare_by_value(kind)
        return kind

    return decorate if kind is None else decorate(kind)


def _compare_by_value(kind: Any) -> None:
    values = attrgetter(*(value.name for value in fields(kind) if value.compare))

    def equal(self: Any, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def hash_of_values(self: Any) -> int:
        return hash(values(self))

    kind.__eq__, kind.__hash__ = equal, hash_of_values
