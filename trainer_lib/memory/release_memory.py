"""Release memory: collect garbage and empty the device's cache."""

import gc
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory that torch caches to the device, if there is one.

    Args:
        garbage_collection: Collect reference cycles first, which takes a while.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Free memory, and return a `None` for each of `objects` to overwrite it with.

    Example:
        >>> a, b = torch.ones(1000), torch.ones(1000)
        >>> a, b = release_memory(a, b)
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count
