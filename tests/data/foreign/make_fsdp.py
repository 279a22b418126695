"""Makes `accelerate_fsdp/` beside this file: FSDP2 checkpoints of two processes, in shards and whole, by Accelerate.

Run by hand, with accelerate: `torchrun --nproc_per_node 2 tests/data/foreign/make_fsdp.py`.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FOLDER = Path("accelerate_fsdp")


class Ranks:
    """What Accelerate's functions ask an Accelerator; a real one shards on GPUs only."""

    num_processes = 2
    is_fsdp2 = True

    def __init__(self) -> None:
        state = PartialState(cpu=True)
        self.process_index, self.is_main_process = state.process_index, state.is_main_process
        self.wait_for_everyone = state.wait_for_everyone


def main() -> None:
    ranks = Ranks()
    os.chdir(Path(__file__).parent)  # the shards note the path that they are written to
    if ranks.is_main_process:
        shutil.rmtree(FOLDER, ignore_errors=True)
    ranks.wait_for_everyone()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        save_fsdp_model(plugin, ranks, model, FOLDER)
        save_fsdp_optimizer(plugin, ranks, optimizer, model, FOLDER)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    save_fsdp_model(plugin, ranks, model, FOLDER, use_dcp=False)
    save_fsdp_optimizer(plugin, ranks, optimizer, model, FOLDER, use_dcp=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
