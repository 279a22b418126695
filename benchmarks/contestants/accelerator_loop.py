"""The training loop of a script written for an `Accelerator`, shared by all libraries that have one."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.contestants.base import Contestant
from benchmarks.meters import Meter
from benchmarks.task import IGNORED, MAX_NORM, Task, labels_sum, weights_norm


class AcceleratorLoop(Contestant):
    """A contestant that is an `Accelerator`; others say which, and how it weighs losses."""

    def accelerator(self, task: Task) -> Any:
        """Return a new `Accelerator` for the task."""
        raise NotImplementedError

    def update(self, task: Task, meter: Meter) -> float:
        """Train."""
        accelerator = self.accelerator(task)
        model, optimizer, scheduler, loader = accelerator.prepare(*task.parts())
        total = torch.zeros((), device=task.device)
        with meter:
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.detach()
        norm = weights_norm(model)
        accelerator.free_memory()
        return norm

    def update_by_weight(self, task: Task, meter: Meter) -> float:
        """Train on sums."""
        accelerator = self.accelerator(task)
        model, optimizer, scheduler, loader = accelerator.prepare(*task.parts())
        total = torch.zeros((), device=task.device)
        with meter:
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    weight = (labels != IGNORED).sum()
                    loss = cross_entropy(model(inputs), labels, ignore_index=IGNORED, reduction="sum")
                    self.backward(accelerator, loss, weight)
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.detach()
        norm = weights_norm(model)
        accelerator.free_memory()
        return norm

    def backward(self, accelerator: Any, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Differentiate a sum over `weight` labels, so that the update is that of the mean over all processes."""
        raise NotImplementedError

    def read(self, task: Task, meter: Meter) -> float:
        """Go through the data."""
        accelerator = self.accelerator(task)
        loader = accelerator.prepare(task.loader())
        total = labels_sum([labels for _, labels in loader])
        with meter:
            for _ in loader:
                pass
        accelerator.free_memory()
        return total
