"""Functions of Accelerate's utilities: names of objects, nested attributes, merged dicts, and dicts of threads."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
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


@contextmanager
def GatheredParameters(  # noqa: N802 - the name is DeepSpeed's
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Generator[None]:
    """Do nothing: the block runs with the parameters as they are, as with Accelerate without DeepSpeed's ZeRO-3."""
    del params, modifier_rank, fwd_module, enabled
    yield


class ThreadLocalSharedDict:
    """A dict as an attribute of a class, one for all threads or one for each.

    Args:
        thread_local: Whether each thread has its own dict.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: Any = threading.local() if thread_local else _Storage()

    def __get__(self, obj: Any, objtype: type | None = None) -> dict[str, Any]:
        """Return the dict of this thread."""
        if not hasattr(self._storage, "values"):
            self._storage.values = {}
        return self._storage.values

    def __set__(self, obj: Any, value: dict[str, Any]) -> None:
        """Replace the dict of this thread."""
        self._storage.values = value


class _Storage:
    values: dict[str, Any]
