"""What a launcher adds to a start on two processes, beside one that is made by hand: `python -m benchmarks.launches`.

Each runs the same script, which forms a world through gloo, meets the other process and ends. The clock runs from the
command to its end.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.figures import Sample

_PROGRAM = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
# Two processes and nothing else, which find each other at a port of rank 0.
_BY_HAND = """
import os, socket, subprocess, sys

with socket.create_server(("127.0.0.1", 0)) as listener:
    port = str(listener.getsockname()[1])
world = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**world, "RANK": str(rank)}) for rank in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
_LAUNCHERS = {
    "by hand": ["-c", _BY_HAND],
    "by hand, again": ["-c", _BY_HAND],
    "trainer-lib launch": ["-m", "trainer_lib", "launch", "--cpu", "--num_processes", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def main() -> None:
    """Measure the launchers in turn, round after round, and print what was seen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each launcher runs (default: 7)")
    arguments = parser.parse_args()
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}")
    samples: dict[str, list[Sample]] = {name: [] for name in _LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_PROGRAM)
        for words in _LAUNCHERS.values():  # so that files are in the system's cache, and compiled
            _launch([*words, str(script)])
        for index in range(arguments.rounds):
            names = list(_LAUNCHERS)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                samples[name].append(_launch([*_LAUNCHERS[name], str(script)]))
    for name, runs in samples.items():
        ratios = sorted(run.wall / first.wall for run, first in zip(runs, samples["by hand"], strict=True))
        print(
            f"{name}: time {median(run.wall for run in runs):.2f} s, CPU {median(run.cpu for run in runs):.2f} s, "
            f"time ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def _launch(words: Sequence[str]) -> Sample:
    wall, cpu = time.perf_counter(), _cpu_of_children()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return Sample(_cpu_of_children() - cpu, time.perf_counter() - wall, 0.0)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
