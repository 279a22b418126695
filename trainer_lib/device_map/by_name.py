"""Device maps that are inferred by a name: "auto", "balanced", "balanced_low_0" or "sequential"."""

from collections.abc import Mapping

import torch
from torch import nn

from trainer_lib.device_map import MAPS
from trainer_lib.device_map.balance import get_balanced_memory
from trainer_lib.device_map.infer import infer_auto_device_map
from trainer_lib.device_map.units import Classes
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.modules.device_placement import Device


def infer_map(
    model: nn.Module,
    name: str,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Mapping[str, Device]:
    """Return the device map that a name stands for: "auto" ("balanced"), "balanced_low_0" or "sequential".

    Args:
        model: The model.
        name: The name.
        max_memory: See `infer_auto_device_map`, as for the other arguments.
        no_split_module_classes: By name or as classes.
        dtype: The type of the weights.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        special_dtypes: The types of some weights, by name.
    """
    if name not in MAPS:
        raise ConfigurationError(
            f"{unknown('device_map', name, MAPS)} For one device, give a dict such as {{'': 'cpu'}}."
        )
    memory, low_zero = max_memory, name == "balanced_low_0"
    if name != "sequential":
        memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero)
    return infer_auto_device_map(
        model, memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )
