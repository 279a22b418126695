"""Conversion of logged values: copied on the step's thread, then made plain and flat."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

_PLAIN = (float, int, str, bool, type(None))


class DeviceCopy:
    """A copy of a tensor on its device: the reader waits for the copy, the step does not."""

    __slots__ = ("_copy", "_done")

    def __init__(self, tensor: Any) -> None:
        import torch

        self._copy = tensor.detach().clone()
        self._done = torch.Event(tensor.device)
        self._done.record(torch.accelerator.current_stream(tensor.device))  # by default that of the current device

    def read(self) -> Any:
        """Return the tensor on the host."""
        self._done.synchronize()
        return self._copy.cpu()


def snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of values that later changes do not affect, without waiting for a device."""
    copied = dict(values)
    for name, value in copied.items():
        if type(value) not in _PLAIN:
            copied[name] = _copy(value)
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return snapshot(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from trainer_lib.foundation.device_types import has_events

        return DeviceCopy(value) if has_events(value.device.type) else value.detach().clone()
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 0):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(item if type(item) in _PLAIN else _copy(item) for item in value)
    return value


def read(value: Any) -> Any:
    """Return a copied value on the host."""
    if isinstance(value, DeviceCopy):
        return value.read()
    if isinstance(value, dict):
        return {name: read(item) for name, item in value.items()}
    return type(value)(read(item) for item in value) if type(value) in (list, tuple) else value


def flat(values: Mapping[str, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """Return nested values as one flat dict.

    Example:
        >>> flat({"train": {"loss": 1.0}, "lr": 0.1})
        {'train/loss': 1.0, 'lr': 0.1}
    """
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flattened |= flat(value, separator, f"{full}{separator}")
        else:
            flattened[full] = value
    return flattened


def plain_metrics(values: Mapping[str, Any], takes_texts: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the loggable values, flat and plain, and a description of each other value.

    Example:
        >>> import torch
        >>> plain_metrics({"loss": torch.tensor(0.5), "logits": torch.ones(2, 3), "top": {"k": 1}})
        ({'loss': 0.5, 'top/k': 1}, {'logits': 'a Tensor of shape (2, 3)'})
    """
    good: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in flat(values).items():
        try:
            number = _number(value)
        except Exception as error:  # noqa: BLE001 - a value that cannot be read leaves the others alone
            refused[name] = f"{_described(value)} that cannot be read ({type(error).__name__})"
            continue
        if number is not None:
            good[name] = number
        elif isinstance(value, str) and takes_texts:
            good[name] = value
        else:
            refused[name] = _described(value)
    return good, refused


def _number(value: Any) -> float | int | None:
    if isinstance(value, DeviceCopy):
        value = value.read()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if _fits_64_bits(value) else _as_float(value)
    if callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (0,))) == 1:
        number = value.item()
        return int(number) if isinstance(number, bool) else number if isinstance(number, (int, float)) else None
    return None


def _fits_64_bits(value: int) -> bool:
    """Whether JSON encoders of trackers take an integer: trackio drops a whole run in whose settings one is larger."""
    return -(2**63) <= value < 2**64


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        return f"a {kind} of shape {tuple(shape)}"
    return "None" if value is None else f"a {kind}"


def plain_settings(value: Any) -> Any:
    """Return settings as JSON types: dataclasses as dicts, and unsupported objects as their `str`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)  # not one of numpy's, which YAML does not write
    if isinstance(value, int):
        return int(value) if _fits_64_bits(value) else str(int(value))
    if isinstance(value, Enum):
        return plain_settings(value.value)
    if isinstance(value, (str, PurePath)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_settings(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_settings(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_settings(getattr(value, field.name)) for field in dataclasses.fields(value)}
    number = _number(value)
    return str(value) if number is None else number


def json_safe(value: Any) -> Any:
    """Return plain values with NaN and Inf as text that `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list) else value
