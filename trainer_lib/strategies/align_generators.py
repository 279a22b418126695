"""Let all ranks of a replica draw the same random numbers."""

from typing import Any

import torch
import torch.distributed as dist


def align_generators(group: Any, device: torch.device) -> None:
    """Give all ranks of a group the states of the generators of its first rank."""
    kinds: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    for kind in kinds:
        state = kind.get_rng_state().to(device)
        dist.broadcast(state, group_src=0, group=group)
        kind.set_rng_state(state.cpu())
