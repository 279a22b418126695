"""FSDP2 of Accelerate on CPUs, where its Accelerator does not shard: its own functions save and load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of both libraries, before they are sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step and a rank."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return inputs, (inputs.sum(dim=1) > 0).long()


class TheirFsdp:
    """A model sharded by FSDP2, with Accelerate's functions that save and load it.

    Args:
        kind: The state dict type of the plugin.
    """

    def __init__(self, kind: str) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import fully_shard

        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        self.model, _ = model_and_optimizer()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        rank = dist.get_rank()
        self.accelerator: Any = SimpleNamespace(
            process_index=rank,
            num_processes=dist.get_world_size(),
            is_fsdp2=True,
            is_main_process=rank == 0,
            wait_for_everyone=dist.barrier,
        )

    def train(self, first: int, last: int) -> list[float]:
        """Make the updates of these steps, and return the losses of this rank."""
        losses: list[float] = []
        for step in range(first, last):
            inputs, targets = batch(step, dist.get_rank())
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        """Save as Accelerate's `save_state` does."""
        from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

        save_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Load as Accelerate's `load_state` does."""
        from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

        load_fsdp_model(self.plugin, self.accelerator, self.model, str(folder))
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, str(folder))
