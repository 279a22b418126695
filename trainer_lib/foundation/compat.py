"""This file is names, attributes and dictionaries, of whatever object."""

from functools import reduce
from typing import Any


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or that of the class of anything else."""
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at the end of a dotted path.

    Example:
        >>> recursive_getattr("a text", "__class__.__name__")
        'str'
    """
    return reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Write `source` into `destination`, dictionaries inside them likewise, and return it.

    Example:
        >>> merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}})
        {'a': {'c': 2, 'b': 1}}
    """
    for key, value in source.items():
        inside = destination.get(key)
        if isinstance(value, dict):
            destination[key] = merge_dicts(value, inside if isinstance(inside, dict) else {})
        else:
            destination[key] = value
    return destination
