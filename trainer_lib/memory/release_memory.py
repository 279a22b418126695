"""This file is letting go of memory."""

import gc
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Hand the memory that torch keeps for reuse back to the device, if there is one.

    Args:
        garbage_collection: Collect what only cycles of references keep alive first, which takes a while.
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
