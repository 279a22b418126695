"""Lightning Fabric."""

from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.contestants.base import Contestant, NotOfferedError
from benchmarks.meters import Meter
from benchmarks.task import IGNORED, MAX_NORM, Task, labels_sum, weights_norm


class Fabric(Contestant):
    """`lightning.fabric.Fabric`."""

    name = "Lightning Fabric"
    package = "lightning"
    statement = "from lightning.fabric import Fabric"

    def update(self, task: Task, meter: Meter) -> float:
        """Train."""
        if task.blocks:
            raise NotOfferedError
        fabric, model, optimizer, scheduler, loader = self._set_up(task)
        steps, last = task.accumulation, task.steps - 1
        total = torch.zeros((), device=task.device)
        with meter:
            for index, (inputs, labels) in enumerate(loader):
                updates = (index + 1) % steps == 0 or index == last
                with fabric.no_backward_sync(model, enabled=not updates):
                    loss = cross_entropy(model(inputs), labels)
                    fabric.backward(loss if steps == 1 else loss / steps)
                if updates:
                    fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.detach()
        return weights_norm(model)

    def update_by_weight(self, task: Task, meter: Meter) -> float:
        """Train on sums; how many labels count is a message of its own."""
        fabric, model, optimizer, scheduler, loader = self._set_up(task)
        total = torch.zeros((), device=task.device)
        with meter:
            for inputs, labels in loader:
                weights = fabric.all_reduce((labels != IGNORED).sum(), reduce_op="sum")
                loss = cross_entropy(model(inputs), labels, ignore_index=IGNORED, reduction="sum")
                fabric.backward(loss * (task.world_size / weights))
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.detach()
        return weights_norm(model)

    def read(self, task: Task, meter: Meter) -> float:
        """Go through the data."""
        loader = self._fabric(task).setup_dataloaders(task.loader())
        total = labels_sum([labels for _, labels in loader])
        with meter:
            for _ in loader:
                pass
        return total

    def _set_up(self, task: Task) -> tuple[Any, Any, Any, Any, Any]:
        parts, fabric = task.parts(), self._fabric(task)
        model, optimizer = fabric.setup(parts.model, parts.optimizer)
        return fabric, model, optimizer, parts.scheduler, fabric.setup_dataloaders(parts.loader)

    def _fabric(self, task: Task) -> Any:
        strategy = "auto" if task.world_size == 1 else "ddp"
        library = import_module("lightning.fabric")
        fabric = library.Fabric(accelerator=task.device, devices=task.world_size, strategy=strategy)
        fabric.launch()
        return fabric
