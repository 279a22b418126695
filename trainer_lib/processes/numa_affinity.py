"""Bind a process to the cores of the NUMA node that its GPU is attached to."""

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from trainer_lib.foundation import environment

_logger = logging.getLogger(__name__)  # not get_logger: each rank has its own cores
_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


@dataclass
class CPUInformation:
    """The rank of a process and the size of its world, as its launcher set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the rank of this process and the size of its world, as its launcher set them."""
    world = environment.read_world()
    if world is None:
        return CPUInformation()
    return CPUInformation(world.rank, world.size, world.local_rank, world.local_size)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to its GPU, once a process; see `override_numa_affinity`."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to its GPU; without a GPU or NUMA nodes nothing changes.

    Args:
        local_process_index: The index of the GPU, which is the local rank.
        verbose: Whether to log the cores; by default in debug mode.
    """
    import torch

    if not torch.cuda.is_available():
        return
    properties = torch.cuda.get_device_properties(local_process_index)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = _cores_of_node(_DEVICES / place / "numa_node") & os.sched_getaffinity(0)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    if environment.debug_mode() if verbose is None else verbose:
        _logger.info("Process %d is bound to the cores %s.", local_process_index, sorted(cores))


def _cores_of_node(file: Path) -> set[int]:
    try:
        return _numbers((_NODES / f"node{int(file.read_text())}" / "cpulist").read_text())
    except (OSError, ValueError):  # -1: the machine has one node
        return set()


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}
