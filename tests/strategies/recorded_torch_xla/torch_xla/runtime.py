"""Questions about this process and its devices."""

import os

import torch.distributed as dist


def device_type() -> str:
    """Return what the variable names."""
    return os.environ["PJRT_DEVICE"]


def global_ordinal() -> int:
    """Return the rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, once they have formed a world."""
    return dist.get_world_size() if dist.is_initialized() else 1


def addressable_device_count() -> int:
    """Return the number of devices of this process."""
    return int(os.environ.get("RECORDED_DEVICES", "1"))
