"""What a script saw: its losses, metrics, rates and weights, in order."""

from typing import Any

import torch

_entries: list[tuple[str, Any]] = []


def record(name: str, value: Any) -> None:
    """Note a value, or a state of tensors."""
    if isinstance(value, dict):
        value = {key.removeprefix("module."): torch.as_tensor(tensor).clone() for key, tensor in value.items()}
    elif isinstance(value, torch.Tensor):
        value = value.detach().clone()
    _entries.append((name, value))


def take_records() -> list[tuple[str, Any]]:
    """Return what was noted since the last call."""
    taken = list(_entries)
    _entries.clear()
    return taken
