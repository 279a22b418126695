"""How much memory the devices and the host have free."""

from collections.abc import Mapping

import torch

from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.foundation.device_types import is_shared
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError


def get_max_memory(max_memory: Mapping[int | str, float | str] | None = None) -> dict[int | str, int]:
    """Return the free memory of each accelerator device (by its index) and of the host ("cpu"), in bytes.

    Args:
        max_memory: Sizes such as `{0: "10GB", "cpu": "30GB"}`, which are returned as numbers instead.

    Example:
        >>> get_max_memory({"cpu": "1GB"})
        {'cpu': 1000000000}
    """
    import psutil

    if max_memory is not None:
        if not isinstance(max_memory, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"max_memory must be a dict of limits by device (got {shown(max_memory)}). Use {{'cpu': '10GB'}}, with "
                "the index of an accelerator, 'cpu' or 'disk' as keys."
            )
        return {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    memory: dict[int | str, int] = {}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and is_shared(accelerator.type):
        return {accelerator.type: psutil.virtual_memory().available}  # one memory for both
    if accelerator is not None:
        devices = range(torch.accelerator.device_count())
        memory |= {index: torch.accelerator.get_memory_info(index)[0] for index in devices}
    return {**memory, "cpu": psutil.virtual_memory().available}
