"""Numbers that differ between Accelerate and this library, for the library that is named."""

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class Counted(IterableDataset[int]):
    """Twelve samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def numbers(library: str) -> dict[str, Any]:
    """Return the numbers of this rank, by what they are of."""
    module: Any = importlib.import_module(library)
    found: dict[str, Any] = {}
    accelerator = module.Accelerator(cpu=True, gradient_accumulation_steps=4)

    def prepared(*data: Any) -> tuple[Any, ...]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step)
        return model, *accelerator.prepare(model, optimizer, schedule, *data)

    def gradient(model: Any) -> float:
        accelerator.unscale_gradients()
        return float(model.weight.grad)

    # Seven micro-batches on each rank are windows of four and three; each has the gradient 1.
    plain, model, optimizer, schedule, loader = prepared(DataLoader(torch.ones(7 * accelerator.num_processes, 1), 1))  # type: ignore[arg-type]
    windows: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                windows.append(gradient(plain))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    found |= {"windows": windows, "learning rate after two updates": schedule.get_last_lr()[0]}

    # One window; the mean of all samples is 3.5.
    samples = torch.arange(4.0 * accelerator.num_processes)[:, None]
    plain, model, optimizer, _, loader = prepared(DataLoader(samples, 1))  # type: ignore[arg-type]
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                found["zero_grad first"] = gradient(plain)
            optimizer.step()

    loader = accelerator.prepare(DataLoader(range(10), 2))  # type: ignore[arg-type]
    found["means gathered"] = [accelerator.gather_for_metrics(batch.float().mean()).tolist() for batch in loader]
    found["iterable"] = type(accelerator.prepare(DataLoader(Counted(), 2))).__name__
    return found


def checkpoints(library: str) -> dict[str, Any]:
    """Return the number that a resumed project saves under after three saves, and whether a limit needs numbers."""
    module: Any = importlib.import_module(library)
    configuration: Any = importlib.import_module(f"{library}.utils").ProjectConfiguration
    with tempfile.TemporaryDirectory() as folder:
        for save in (True, False):
            options = configuration(project_dir=folder, automatic_checkpoint_naming=True)
            accelerator = module.Accelerator(cpu=True, project_config=options)
            accelerator.prepare(torch.nn.Linear(1, 1))
            for _ in range(3 if save else 0):
                accelerator.save_state()
        accelerator.load_state()
        return {"next number": accelerator.save_iteration}
