"""Functions of Accelerate's utilities: names of objects, nested attributes, merged dicts, and dicts of threads."""

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any

from torch import Tensor


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
    """Make parameters that DeepSpeed's ZeRO-3 shards whole inside the block, which all ranks enter; others stay.

    Args:
        params: A parameter, or several of them.
        modifier_rank: The rank whose changes all ranks get, the optimizer's fp32 weights too; `None` for none.
        fwd_module: The module that uses them in a forward, for parameters of other modules.
        enabled: Whether to gather them.
    """
    given: list[Any] = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
    sharded = [parameter for parameter in given if hasattr(parameter, "ds_id")] if enabled else []
    if not sharded:
        yield
        return
    gathered = import_module("deepspeed").zero.GatheredParameters
    with gathered(sharded, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield
        if modifier_rank is not None:
            _set_fp32_weights(sharded, modifier_rank)


def _set_fp32_weights(parameters: Iterable[Any], rank: int) -> None:
    """Give the fp32 weights that an optimizer steps the values that one rank has, which its next step would undo."""
    utilities, communication = import_module("deepspeed.utils"), import_module("torch.distributed")
    for parameter in parameters:
        if hasattr(parameter, "_z3_optimizer"):
            communication.broadcast(parameter.data, rank)
            utilities.safe_set_full_fp32_param(parameter, parameter.data.float())


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
