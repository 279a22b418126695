"""Comparisons with several ranks: all contestants take turns in the same processes."""

import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contestants import Contestant
from benchmarks.figures import Comparison
from benchmarks.rounds import compare
from benchmarks.scenarios import Scenario


def compare_on_processes(
    scenario: Scenario, contestants: Sequence[type[Contestant]], rounds: int, steps: int
) -> Comparison:
    """Do as `compare` does, on as many CPU processes as the scenario names."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder), scenario, contestants, rounds, steps)
        torch.multiprocessing.spawn(_work, arguments, nprocs=scenario.world_size)
        return pickle.loads((Path(folder) / "comparison").read_bytes())


def _work(
    rank: int, folder: Path, scenario: Scenario, contestants: Sequence[type[Contestant]], rounds: int, steps: int
) -> None:
    size = str(scenario.world_size)
    # What torchrun sets: contestants look there for their place.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=scenario.world_size)
    comparison = compare(scenario, contestants, rounds, steps)
    if rank == 0:
        (folder / "comparison").write_bytes(pickle.dumps(comparison))
    dist.barrier()  # nobody closes a connection that another still needs
    dist.destroy_process_group()
