"""Writes checkpoints with DeepSpeed itself, of stages 1 to 3 on two ranks, and the weights that they hold.

Run in an environment with DeepSpeed: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 make_deepspeed.py
"""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent / "deepspeed"


class Network(nn.Module):
    """Tied weights, weights that are not trained, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head, self.extra = nn.Linear(6, 11, bias=False), nn.Linear(6, 7)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(5.0))
        self.bn = nn.BatchNorm1d(6)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bn(self.frozen(self.norm(self.emb(tokens))))
        return self.head(hidden).logsumexp(-1).mean() + self.extra(hidden).square().mean()


def write(deepspeed: Any, stage: int) -> None:
    """Train for three steps and save."""
    model = Network()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        torch.manual_seed(step * 2 + dist.get_rank())
        engine.backward(engine(torch.randint(0, 11, (4,))))
        engine.step()
    folder = HERE / f"stage_{stage}"
    engine.save_checkpoint(str(folder), client_state={"mine": {"a": 1}})
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(state, folder / "expected.safetensors")


def main() -> None:
    """Write all of them."""
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    if dist.get_rank() == 0:
        shutil.rmtree(HERE, ignore_errors=True)
    dist.barrier()
    for stage in (1, 2, 3):
        write(deepspeed, stage)
    dist.barrier()
    for script in HERE.glob("*/zero_to_*.py") if dist.get_rank() == 0 else ():
        script.unlink()


if __name__ == "__main__":
    main()
