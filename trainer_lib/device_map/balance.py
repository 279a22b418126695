"""Limits of memory with which a model is spread evenly over the accelerators."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from trainer_lib.device_map.device_map_plan import Device
from trainer_lib.device_map.infer import fits, lists_accelerators, memory_limits
from trainer_lib.device_map.units import Classes, Unit, units_of

_Limits = Callable[[int], Mapping[Device, int]]

_OF_ONE = 0.9  # of the free memory of a single accelerator: activations need some


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return limits for `infer_auto_device_map` with which the fullest accelerator holds as little as possible.

    The last accelerator keeps its own limit, as in Accelerate: a map that needs a little more room than was computed
    here (another `dtype`, other classes) uses it, instead of the host's memory. Limits that are too small for the model
    on the accelerators alone are returned as they are.

    Args:
        model: The model, which may be on the meta device.
        max_memory: How much of each device to use; by default what is free (of a single accelerator, 90%).
        no_split_module_classes: See `infer_auto_device_map`.
        dtype: See `infer_auto_device_map`.
        special_dtypes: See `infer_auto_device_map`.
        low_zero: Whether to put as little as possible on the first accelerator, whose memory `generate` needs.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
        >>> get_balanced_memory(model, {0: 5000, 1: 5000})
        {0: 880, 1: 5000}
    """
    memory = {device: limit for device, limit in memory_limits(max_memory).items() if limit is not None}
    accelerators = [device for device in lists_accelerators(memory) if memory[device] > 0]
    if len(accelerators) < 2:
        if max_memory is None:
            memory |= {device: int(memory[device] * _OF_ONE) for device in accelerators}
        return memory
    units = units_of(model, no_split_module_classes, dtype, special_dtypes)
    if low_zero:
        first, *others = accelerators
        all_of_others = {device: memory[device] for device in others}
        least = _least(units, memory[first], lambda limit: {first: limit, **all_of_others})
        if least is None:
            return memory
        memory[first] = least
        accelerators, kept = others, {first: least}
    else:
        kept = dict[Device, int]()
    limits = {device: memory[device] for device in accelerators}
    least = _least(
        units, max(limits.values()), lambda limit: kept | {device: min(limit, most) for device, most in limits.items()}
    )
    if least is None:
        return memory
    # The last one keeps its limit: what needs more room than was computed goes there, instead of to the host.
    return memory | {device: min(least, limits[device]) for device in accelerators[:-1]}


def _least(units: list[Unit], most: int, memory: _Limits) -> int | None:
    """Return the smallest limit with which all units fit; `None` if `most` is too small."""
    if not fits(units, memory(most)):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(units, memory(middle)) else (middle + 1, high)
    return low
