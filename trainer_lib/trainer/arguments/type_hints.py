"""What the type hint of an argument allows: the members of a union, texts to choose from, objects with fields."""

import dataclasses
import functools
import types
import typing
from typing import Any, Union

from typing_extensions import TypeAliasType

from trainer_lib.foundation.duration import Every


@functools.lru_cache(maxsize=64)
def field_types(cls: type[Any]) -> dict[str, Any]:
    """Return the type of each field of a dataclass; `Any` for a text that names something its module does not have."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, AttributeError):  # imported for type checkers only, or local to a function
        base = next((base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)), None)
        types_of_base = {} if base is None else field_types(base)  # a field's own type is what a parser left there
        own = {field.name: field.type for field in dataclasses.fields(cls) if field.name not in types_of_base}
        return types_of_base | {name: Any if isinstance(hint, str) else hint for name, hint in own.items()}


def members(hint: Any) -> list[Any]:
    """Return the types that a hint allows, `NoneType` for `None`.

    Example:
        >>> members(int | str | None)
        [<class 'int'>, <class 'str'>, <class 'NoneType'>]
    """
    if isinstance(hint, TypeAliasType):
        return members(hint.__value__)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return list(dict.fromkeys(kind for member in typing.get_args(hint) for kind in members(member)))
    return [types.NoneType if hint is None else hint]


def choices(hint: Any) -> list[str]:
    """Return the texts that a hint allows by `Literal`."""
    literals = [kind for kind in members(hint) if typing.get_origin(kind) is typing.Literal]
    return [text for literal in literals for text in typing.get_args(literal)]


def has_fields(kind: Any) -> bool:
    """Whether objects of a type are written as mappings of their fields; an `Every` is written as a text."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not Every
