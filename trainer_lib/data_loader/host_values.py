"""What integers of a batch were on the host, before the batch was copied to an accelerator.

Counting labels there waits for nothing. On the accelerator it takes several kernels, and all that depends on the count
has to stay there.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trainer_lib.foundation.tensors.pytree import send_to_device

_host_values = WeakTensorKeyDictionary()  # by the tensor on the accelerator


def send_remembered(batch: Any, device: Any, non_blocking: bool = False) -> Any:
    """Return a batch on an accelerator; `host_value` knows what its tensors of integers were on the host.

    Example:
        >>> import torch
        >>> batch = send_remembered({"labels": torch.tensor([1, -100])}, "meta")
        >>> host_value(batch["labels"]).tolist()
        [1, -100]
    """
    integers = _integers_of(batch)  # before: some batches are moved in place
    moved = send_to_device(batch, device, non_blocking)
    for key, host in integers.items():
        value = moved[key]
        # A tensor that was not moved would keep itself; those of inference have no versions.
        if type(value) is Tensor and value is not host and not value.is_inference():
            _host_values[value] = host
    return moved


def host_value(tensor: Tensor) -> Tensor:
    """Return what a tensor was on the host, if it was not changed since it was sent; else the tensor itself."""
    host: Tensor | None = _host_values.get(tensor)
    if host is None or tensor._version:  # pyright: ignore[reportPrivateUsage]  # documented without a public name
        return tensor
    return host


def _integers_of(batch: Any) -> dict[Any, Tensor]:
    """Return the tensors of integers on the host in a batch, by name or position."""
    if isinstance(batch, Mapping):
        values = batch.items()
    elif isinstance(batch, (tuple, list)):
        values = enumerate(batch)
    else:
        return {}
    return {
        key: value
        for key, value in values
        if type(value) is Tensor and value.is_cpu and not value.dtype.is_floating_point
    }
