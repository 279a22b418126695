"""Functions of Accelerate's utilities: names of objects, nested attributes, and merged dictionaries."""

from functools import reduce
from typing import Any


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function; of any other object, the name of its class."""
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at the end of a dotted path.

    Example:
        >>> recursive_getattr("a text", "__class__.__name__")
        'str'
    """
    return reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination` recursively, and return `destination`.

    Example:
        >>> merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}})
        {'a': {'c': 2, 'b': 1}}
    """
    for key, value in source.items():
        current = destination.get(key)
        if isinstance(value, dict):
            destination[key] = merge_dicts(value, current if isinstance(current, dict) else {})
        else:
            destination[key] = value
    return destination
