"""Reading JSON strictly: no duplicate keys, no NaN or Infinity, no unlimited nesting."""

import json
from typing import Any, NoReturn


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not valid JSON, has a duplicate key, NaN or Infinity, or is nested too deeply.

    Example:
        >>> read_json('{"step": 1, "step": 2}')
        Traceback (most recent call last):
        ...
        ValueError: it has the key 'step' twice
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return read


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid number")
