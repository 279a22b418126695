"""Make modules whose weights are on a chosen device from the start, or are shapes without memory (meta)."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Have modules that are made in a `with` block keep only the shapes of their weights, without memory.

    Without `include_buffers` each weight takes its memory for the moment in which its module is made.

    Args:
        include_buffers: Whether buffers have no memory either; by default they are made as usual.

    Example:
        >>> with init_empty_weights():
        ...     layer = torch.nn.Linear(1000, 1000)
        >>> layer.weight.device
        device(type='meta')
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Generator[None]:
    """Have modules that are made in a `with` block get their weights on a device.

    Args:
        device: The device.
        include_buffers: Whether buffers are made there too.
    """
    if include_buffers:
        # torch's own way: tensors are made on the device, instead of being moved there.
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_device(self: nn.Module, name: str, param: Any) -> None:
        register(self, name, None if param is None else _moved(param, device))

    nn.Module.register_parameter = register_on_device
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    moved = type(parameter)(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(moved, name, value)
    return moved
