"""The choice of a rank's device, by torch's device-generic API."""

import torch

from trainer_lib.foundation import environment
from trainer_lib.foundation.device_types import has_index, is_shared, visible_devices_variable
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.foundation.launcher_variables import World


def choose_device(cpu: bool, world: World | None) -> torch.device:
    """Return the device of this rank: the accelerator of its local rank if there is one, otherwise the CPU."""
    requested = environment.device_requested()
    if cpu or environment.cpu_requested():
        return torch.device("cpu")
    if requested is not None:
        return _requested_device(requested, world)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (is_shared(accelerator.type) and world is not None and world.size > 1):
        return torch.device("cpu")
    return torch.device(accelerator.type, _index(accelerator.type, world))


def use_device(device: torch.device) -> None:
    """Make `device` the current device of its type, and use the cores near it if the launcher asks for that."""
    if has_index(device):
        torch.accelerator.set_device_index(device.index)
        if environment.cpu_affinity_requested():
            from trainer_lib.processes.numa_affinity import set_numa_affinity

            set_numa_affinity(device.index)


def _requested_device(name: str, world: World | None) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"ACCELERATE_TORCH_DEVICE={name!r} is not a device of torch: {error}") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type or is_shared(device.type) or device.index is not None:
        return device
    return torch.device(device.type, _index(device.type, world))


def _index(kind: str, world: World | None) -> int:
    if world is None:
        return torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if count == 1 and _sees_its_own_device(kind, world):
        return 0
    if world.local_rank >= count:
        raise WorldError(
            f"Rank {world.rank} needs {kind} device {world.local_rank}, and this machine has {count}. "
            f"Start at most {count} processes per machine, or train on the CPU: "
            "`trainer-lib launch --cpu` or ACCELERATE_USE_CPU=1."
        )
    return world.local_rank


def _sees_its_own_device(kind: str, world: World) -> bool:
    """Whether the one device that this rank sees is likely no other rank's."""
    if world.launcher == "srun":  # --gpus-per-task=1
        return True
    variable = visible_devices_variable(kind)
    # Set by a script between mpirun and the rank, as in CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK.
    return world.launcher == "mpirun" and variable is not None and environment.variable(variable) is not None
