"""A small model and a training loop for tests on GPUs; the same numbers are computed by any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.worlds import forget_world
from trainer_lib import Accelerator
from trainer_lib.events import Callback, Run

ROWS = 16  # of a batch of all ranks
WIDTH = 64  # a multiple of 16, as fp8 needs


def network(dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """Return the model, with the same weights each time; `norm` puts BatchNorm into it."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (32, WIDTH, WIDTH):
        layers += [nn.Linear(inputs, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def data(batches: int = 8) -> TensorDataset:
    """Return inputs and classes."""
    inputs = torch.randn(batches * ROWS, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def adamw(parameters: Any) -> Optimizer:
    """Return torch's fused AdamW."""
    return AdamW(parameters, lr=3e-3, fused=True)


class ForbidsWaiting(Callback):
    """Raises for what waits for the device, from the third step to the last but one."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_begin(self, run: Run) -> None:
        torch.cuda.set_sync_debug_mode("error" if 2 <= run.state.step < 7 else "default")

    def on_step_end(self, run: Run) -> None:
        del run
        self.steps += torch.cuda.get_sync_debug_mode() == 2
        torch.cuda.set_sync_debug_mode("default")


@dataclass
class Report:
    """What came of a training, on the CPU."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    skipped: list[bool] = field(default_factory=list[bool])
    device: str = ""
    backend: str = ""


def train(
    make: Callable[[Any], Optimizer] = adamw,
    *,
    model: nn.Module | None = None,
    steps: int = 8,
    save: Path | None = None,
    load: Path | None = None,
    clip: float | None = 1.0,
    **options: Any,
) -> Report:
    """Train in this process as if it were a fresh one, on its own device unless `cpu=True`.

    Args:
        make: Returns the optimizer.
        model: The model.
        steps: Batches to train on.
        save: Where to save the state after half of them.
        load: A saved state, from which the second half is trained.
        clip: The norm that gradients are clipped to.
        options: Arguments of the Accelerator.
    """
    forget_world()
    torch.manual_seed(5)
    accelerator = Accelerator(**options)
    trained: Any = network() if model is None else model
    loader = DataLoader(data(steps), batch_size=ROWS // accelerator.num_processes)
    trained, optimizer, loader = accelerator.prepare(trained, make(trained.parameters()), loader)
    if load is not None:
        accelerator.load_state(load)
    report = Report(device=accelerator.device.type, backend=str(accelerator.state.backend))
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(trained):
            loss = cross_entropy(trained(inputs), targets)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                report.norms.append(float(accelerator.clip_grad_norm_(trained.parameters(), clip)))
            optimizer.step()
            report.skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        report.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if save is not None and step == steps // 2 - 1:
            accelerator.save_state(save)
    state = accelerator.get_state_dict(trained)
    report.weights = {name: value.cpu() for name, value in (state or {}).items()}
    accelerator.free_memory()
    return report
