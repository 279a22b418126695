"""The cost of an Accelerator's saves and loads, compared with the least possible: `python -m benchmarks.checkpoints`.

The floors: a copy of all tensors into buffers that are there for the stall of a save in the background, safetensors'
own writer and an fsync for a save, and reading every byte for a load. Of several rounds the fastest counts.
`python -m benchmarks.checkpoints_of_runs` measures those of a Trainer.
"""

import argparse
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.devices import add_device, wait_for_gpu
from trainer_lib import Accelerator

WIDTH = 1024


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parameters", type=float, default=250e6, help="of the model (default: 250 million)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is done (default: 3)")
    add_device(parser)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    try:
        measure(arguments.parameters, arguments.rounds, arguments.device, folder)
    finally:
        shutil.rmtree(folder)


def measure(parameters: float, rounds: int, device: str, folder: Path) -> None:
    """Measure on one model."""
    accelerator, tensors = trained(round(parameters / WIDTH**2), device)
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(
        f"{machine.describe()}; load {os.getloadavg()[0]:.1f}; a state of {size / 1e9:.2f} GB in {len(tensors)} tensors"
    )

    first_copy, buffers = timed(lambda: new_copy(tensors))
    copies = [timed(lambda: copy(buffers, tensors))[0] for _ in range(rounds)]
    buffers.clear()
    before = resident()  # with what the allocator has not given back
    stalls: list[float] = []
    with Peak() as peak:
        for number in range(rounds + 1):
            stall, _ = timed(lambda number=number: accelerator.save_state(folder / f"b{number % 2}", background=True))
            stalls.append(stall)
            accelerator.wait_for_save()
    report("stall of the first save in the background", stalls[0], first_copy, "copy into new buffers", "at most 1.15")
    report("stall of the next ones", min(stalls[1:]), min(copies), "copy into the same buffers", "at most 1.15")
    print(f"memory beyond the training's while saving: {(peak.bytes - before) / size:.2f} states (at most 1)")
    accelerator.checkpoints.background.release()

    saves: list[float] = []
    floors: list[float] = []
    for number in range(2 * rounds):  # each comes first as often as second, where the disk is still busy
        for name in ("floor", "state"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for is_save in (number % 2 == 0, number % 2 == 1):
            if is_save:
                saves.append(timed(lambda: accelerator.save_state(folder / "state"))[0])
            else:
                floors.append(timed(lambda: safetensors(tensors, folder / "floor"))[0])
    report("save", min(saves), min(floors), "safetensors and fsync", "at most 1.11")

    for is_cold in (True, False):
        loads: list[float] = []
        reads: list[float] = []
        for number in range(2 * rounds):
            for is_load in (number % 2 == 0, number % 2 == 1):
                if is_cold:
                    forget(folder / "state")
                if is_load:
                    loads.append(timed(lambda: accelerator.load_state(folder / "state"))[0])
                else:
                    reads.append(timed(lambda: read(folder / "state"))[0])
        where = "the disk" if is_cold else "the system's memory"
        report(f"load from {where}", min(loads), min(reads), "reading every byte", "at most 1.1")


def trained(layers: int, device: str) -> tuple[Accelerator, dict[str, Tensor]]:
    """Return an engine with a model and its AdamW after an update, and all of their tensors."""
    accelerator = Accelerator(cpu=device == "cpu")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, layers))))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    return accelerator, tensors


def new_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy all tensors into new buffers; those of tensors on a GPU are pinned."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.clone() for name, tensor in tensors.items()}
    buffers = {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in tensors.items()}
    copy(buffers, tensors)
    return buffers


def copy(buffers: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy all tensors into buffers that are there."""
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor, non_blocking=True)
    wait_for_gpu()


def safetensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write all tensors as safetensors' own library does, and have the disk take them."""
    folder.mkdir()
    for kind in ("model", "optimizer"):
        path = folder / f"{kind}.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if name.startswith(kind)}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read(folder: Path) -> list[bytes]:
    """Read every byte of a folder, into memory as a load has to."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def forget(folder: Path) -> None:
    """Have the system forget what it holds of files in memory, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds something takes, and what it returns."""
    began = time.perf_counter()
    result = do()
    wait_for_gpu()
    return time.perf_counter() - began, result


def report(kind: str, seconds: float, floor: float, of: str, goal: str) -> None:
    """Print a line."""
    print(f"{kind}: {seconds:.3f} s, {seconds / floor:.2f} of {of} ({floor:.3f} s; {goal})")


class Peak:
    """The most memory that the process has while a block runs, looked at often."""

    bytes = 0

    def __enter__(self) -> "Peak":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.bytes = max(self.bytes, resident())


def resident() -> int:
    """Return the memory of the process, without what it maps of files."""
    if not sys.platform.startswith("linux"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Path("/proc/self/statm").open() as file:
        _, pages, shared, *_ = map(int, file.read().split())
    return (pages - shared) * resource.getpagesize()


if __name__ == "__main__":
    main()
