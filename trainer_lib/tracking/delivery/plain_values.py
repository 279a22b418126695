"""This file is what becomes of values on their way to a tracker: kept as they were, then made plain and flat."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

_PLAIN = (float, int, str, bool, type(None))


class Later:
    """A tensor on a device, copied there; whoever reads it waits for the copy, and not the step."""

    __slots__ = ("_copy", "_done")

    def __init__(self, tensor: Any) -> None:
        import torch

        self._copy = tensor.detach().clone()
        self._done = torch.Event(tensor.device)
        self._done.record()

    def read(self) -> Any:
        """Return it, on the host."""
        self._done.synchronize()
        return self._copy.cpu()


def kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that stay as they are now, whatever becomes of what was given; nothing is waited for."""
    copied = dict(values)
    for name, value in copied.items():
        if type(value) not in _PLAIN:
            copied[name] = _kept(value)
    return copied


def _kept(value: Any) -> Any:
    if isinstance(value, Mapping):
        return kept(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone() if value.device.type == "cpu" else Later(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 0):
        return value.copy()
    return list(value) if isinstance(value, list) else value


def read(value: Any) -> Any:
    """Return a kept value as the user's own tracker is handed it."""
    if isinstance(value, Later):
        return value.read()
    if isinstance(value, dict):
        return {name: read(one) for name, one in value.items()}
    return value


def flat(values: Mapping[str, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """Return nested values by one name each.

    Example:
        >>> flat({"train": {"loss": 1.0}, "lr": 0.1})
        {'train/loss': 1.0, 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, separator, f"{full}{separator}")
        else:
            found[full] = value
    return found


def plain_metrics(values: Mapping[str, Any], takes_texts: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what can be logged, flat and plain, and for each of the others what it is.

    Example:
        >>> import torch
        >>> plain_metrics({"loss": torch.tensor(0.5), "logits": torch.ones(2, 3), "top": {"k": 1}})
        ({'loss': 0.5, 'top/k': 1}, {'logits': 'a Tensor of shape (2, 3)'})
    """
    good: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in flat(values).items():
        number = _number(value)
        if number is not None:
            good[name] = number
        elif isinstance(value, str) and takes_texts:
            good[name] = value
        else:
            refused[name] = _described(value)
    return good, refused


def _number(value: Any) -> float | int | None:
    if isinstance(value, Later):
        value = value.read()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    if callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (0,))) == 1:
        one = value.item()
        return int(one) if isinstance(one, bool) else one if isinstance(one, (int, float)) else None
    return None


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        return f"a {kind} of shape {tuple(shape)}"
    return "nothing (None)" if value is None else f"a {kind}"


def plain_settings(value: Any) -> Any:
    """Return settings as JSON has them: objects by their fields, what has no such form as it prints."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Enum):
        return plain_settings(value.value)
    if isinstance(value, (str, PurePath)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_settings(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_settings(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain_settings(getattr(value, one.name)) for one in dataclasses.fields(value)}
    number = _number(value)
    return str(value) if number is None else number


def json_safe(value: Any) -> Any:
    """Return plain values with what JSON has no number for as a text that `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: json_safe(one) for name, one in value.items()}
    return [json_safe(one) for one in value] if isinstance(value, list) else value


def pictures(values: Mapping[str, Any], channels_last: bool) -> dict[str, Any]:
    """Return pictures as arrays, by name; several of a name are one array, of one dimension more.

    Args:
        values: Arrays, tensors, or lists of these or of what numpy reads as a picture.
        channels_last: Whether tensors, which have their channels first, are turned round.
    """
    import numpy

    arrays: dict[str, Any] = {}
    for name, value in values.items():
        several = value if isinstance(value, (list, tuple)) else [value]
        each = [_picture(one, channels_last) for one in several]
        arrays[name] = numpy.stack(each) if isinstance(value, (list, tuple)) else each[0]
    return arrays


def _picture(value: Any, channels_last: bool) -> Any:
    import numpy

    value = value.read() if isinstance(value, Later) else value
    if not hasattr(value, "detach"):
        return numpy.asarray(value)
    array = value.detach().cpu().numpy()
    return numpy.moveaxis(array, -3, -1) if channels_last and array.ndim > 2 else array
