"""A world whose other ranks do not exist, and tensors without values, so that a rank can be simulated."""

import dataclasses
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_lib.commands.plan.fused_attention import fused_attention
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import map_tensors
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.strategies.fsdp import materialize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEVICE = torch.device("cpu")


@frozen_dataclass
class SimulatedWorld:
    """A world of which this process is the first rank.

    Args:
        config: The sizes of its mesh.
        mesh: Its mesh; `None` for a world of one.
    """

    config: ParallelismConfig
    mesh: "DeviceMesh | None"

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process groups of this rank by dimension of the mesh."""
        return {} if self.mesh is None else {name: self.mesh.get_group(name) for name in self.config.active_mesh_dims}


@contextmanager
def simulated_world(config: ParallelismConfig) -> Generator[SimulatedWorld]:
    """Return the context in which messages go nowhere, and new tensors have no values and no memory."""
    if dist.is_initialized():
        raise ConfigurationError("`trainer-lib plan` simulates a world, and this process is in one. Start it alone.")
    config = dataclasses.replace(config)  # with no mesh of an earlier world
    dist.init_process_group("fake", rank=0, world_size=config.total_size)
    try:
        mesh = config.get_device_mesh(DEVICE.type)
        with no_values(), fused_attention():
            yield SimulatedWorld(config, mesh)
    finally:
        dist.destroy_process_group()


def no_values() -> AbstractContextManager[object]:
    """Return the context in which new tensors have shapes and types, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_values(model: nn.Module) -> None:
    """Give a model weights and buffers without values, on the device of the simulation. Call it in the world."""
    empty: dict[torch.Tensor, torch.Tensor] = {
        p: nn.Parameter(_like(p.detach()), p.requires_grad) for p in model.parameters()
    }
    materialize.replace(model, empty)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _like(buffer))


def batch_without_values(batch: Any) -> Any:
    """Return a batch without values, on the device of the simulation. Call it in the world."""
    return map_tensors(_like, batch)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=DEVICE)
