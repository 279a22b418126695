"""Restart a training with a smaller batch when memory runs out, and report the peak memory."""

import argparse
import gc
import json
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import find_executable_batch_size, release_memory, set_seed


class PeakMemory:
    """How much memory this process takes at most inside of the context, watched by a thread."""

    def __enter__(self) -> Self:
        gc.collect()
        self._process = psutil.Process()
        self.begin = self.peak = self._process.memory_info().rss
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._watcher.join()
        gc.collect()
        self.end = self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, self._process.memory_info().rss)


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    tried: list[int] = []
    held: list[weakref.ref[nn.Module]] = []

    @find_executable_batch_size(starting_batch_size=arguments.batch_size)
    def train(batch_size: int, width: int) -> float:
        accelerator.free_memory()
        alive = [reference for reference in held if reference() is not None]
        if alive:
            raise AssertionError(f"{len(alive)} models of earlier tries are still there")
        tried.append(batch_size)
        set_seed(arguments.seed)
        model: Any = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
        held.append(weakref.ref(model))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(batch_size))
        loss = torch.zeros(())
        for inputs, targets in loader:
            if len(inputs) > arguments.fits:
                torch.empty(2**55, dtype=torch.uint8, device=accelerator.device)
            loss = mse_loss(model(inputs).squeeze(-1), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        last = loss.item()
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        return last

    with PeakMemory() as memory:
        loss = train(arguments.width)

    # Without an accelerator: plain objects are let go of as well.
    model: Any = nn.Linear(4, 4)
    tensor: Any = torch.zeros(1 << 20)
    held.append(weakref.ref(model))
    model, tensor = release_memory(model, tensor)

    figures = {
        "tried": tried,
        "loss": loss,
        "alive": sum(reference() is not None for reference in held),
        "released": [model, tensor],
        "peak": memory.peak - memory.begin,
        "left": memory.end - memory.begin,
    }
    every = accelerator.gather(torch.tensor([[tried[-1], figures["alive"]]], device=accelerator.device)).tolist()
    if accelerator.is_main_process:
        Path(arguments.figures).write_text(json.dumps(figures | {"every": every}))
    accelerator.end_training()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 400 samples of a function of 8 variables."""
    inputs = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1)), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=100, help="of each process")
    parser.add_argument("--fits", type=int, default=75, help="how many samples a process can hold")
    parser.add_argument("--width", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write batch sizes and bytes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
