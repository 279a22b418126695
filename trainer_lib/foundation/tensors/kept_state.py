"""Attributes and tensors that a block may change, and that are restored after it."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def attributes_kept(objects: Iterable[Any], names: Sequence[str]) -> Generator[None]:
    """Restore attributes of objects after the block.

    Args:
        objects: The objects.
        names: The names of the attributes, which each object has.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with attributes_kept([layer], ["training"]):
        ...     layer.training = False
        >>> layer.training
        True
    """
    kept = [(owner, name, getattr(owner, name)) for owner in objects for name in names]
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


@contextmanager
def tensors_kept(tensors: Iterable[Tensor]) -> Generator[None]:
    """Restore the values of tensors after the block."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
