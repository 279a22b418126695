"""DeepSpeed's own global state: its process group, its device, its logger."""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

_GROUPS = ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
_world: Any = None  # the group that DeepSpeed runs in


def started(device: torch.device) -> Any:
    """Return the package `deepspeed`, which communicates in the process group that torch has now.

    Args:
        device: The device of this rank.
    """
    # DeepSpeed calls collectives by names that torch has replaced.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device.type == "cpu":
        _use_cpu()
    import deepspeed  # pyright: ignore[reportMissingImports]

    package: Any = deepspeed
    package.utils.logger.setLevel(logging.WARNING)
    _join(package)
    return package


def _use_cpu() -> None:
    """Let DeepSpeed compute on the CPU, whatever else the machine has."""
    from deepspeed.accelerator import real_accelerator  # pyright: ignore[reportMissingImports]
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # pyright: ignore[reportMissingImports]

    chosen: Any = real_accelerator
    if chosen.ds_accelerator is None:
        chosen.set_accelerator(CPU_Accelerator())


def _join(package: Any) -> None:
    global _world
    if dist.group.WORLD is _world:
        return
    comm: Any = package.comm.comm
    comm.cdb = None
    for name in _GROUPS:  # of a world that this process has left
        setattr(package.utils.groups, name, None)
    # A reduction in shared memory, for inference alone: DeepSpeed would compile it now, for minutes.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    package.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
    )
    _world = dist.group.WORLD
