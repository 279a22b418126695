"""What an optimizer's step costs where weights are sharded (FSDP2): `python -m benchmarks.sharded_updates`.

Beside `optimizer.step()` of torch by hand, which updates DTensors, and of the same numbers in a model that is not
sharded. One process holds all shards: the rules of layouts take the same on each rank of many.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import machine
from trainer_lib.strategies.shard_updates import update_shards

KINDS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": AdamW,
    "AdamW, `foreach`": lambda weights: AdamW(weights, foreach=True),
    "AdamW, `fused`": lambda weights: AdamW(weights, fused=True),
    "SGD with momentum, `foreach`": lambda weights: SGD(weights, lr=0.1, momentum=0.9, foreach=True),
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_updates", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=24, help="of six weights each (default: 24)")
    parser.add_argument("--steps", type=int, default=30, help="after the first one (default: 30)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}; {6 * arguments.layers} weights")
        print("\n| | first step by hand | trainer_lib | a step by hand | trainer_lib | whole weights |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, kind in KINDS.items():
            by_hand = measure(kind, arguments.layers, arguments.steps)
            ours = measure(kind, arguments.layers, arguments.steps, as_shards=True)
            whole = measure(kind, arguments.layers, arguments.steps, is_sharded=False)
            first, later = f"{by_hand[0]:.0f} ms | {ours[0]:.0f} ms", f"{by_hand[1]:.1f} ms | {ours[1]:.1f} ms"
            print(f"| {name} | {first} | {later} | {whole[1]:.1f} ms |")
        dist.destroy_process_group()


def measure(
    kind: Callable[..., Optimizer], layers: int, steps: int, *, is_sharded: bool = True, as_shards: bool = False
) -> tuple[float, float]:
    """Return the CPU time of the first step, and the median of the next ones, in milliseconds."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(layers))
    )
    if is_sharded:
        mesh = init_device_mesh("cpu", (1,))
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh)
    optimizer = kind(model.parameters())
    if as_shards:
        update_shards(optimizer)
    model(torch.ones(2, 16)).sum().backward()
    seconds: list[float] = []
    for _ in range(1 + steps):
        start = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - start)
    return 1000 * seconds[0], 1000 * median(seconds[1:])


if __name__ == "__main__":
    main()
