"""Hugging Face Accelerate, with the same loop as this library's `Accelerator`."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.contestants.accelerator_loop import AcceleratorLoop
from benchmarks.contestants.base import NotOfferedError
from benchmarks.meters import Meter
from benchmarks.task import Task


class Accelerate(AcceleratorLoop):
    """`accelerate.Accelerator`."""

    name = "Accelerate"
    package = "accelerate"
    statement = "from accelerate import Accelerator"

    def accelerator(self, task: Task) -> Any:
        """Return a new `Accelerator`."""
        if task.blocks:
            raise NotOfferedError  # on the CPU it silently ignores its FSDP plugin, and trains with DDP
        accelerate = import_module("accelerate")
        return accelerate.Accelerator(cpu=task.device == "cpu", gradient_accumulation_steps=task.accumulation)

    def backward(self, accelerator: Any, loss: Tensor, weight: Tensor) -> None:
        """Sum the weights of all processes first, as its documentation does, and divide by them."""
        weights = accelerator.reduce(weight, "sum")
        accelerator.backward(loss * (accelerator.num_processes / weights))

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Gather what counts, batch by batch, as its examples do."""
        accelerator = self.accelerator(task)
        loader = accelerator.prepare(task.scores())
        loss = torch.zeros((), device=task.device)
        correct, count = torch.zeros((), dtype=torch.int64, device=task.device), 0
        with meter, torch.no_grad():
            for scores, labels in loader:
                metrics = scores.argmax(1) == labels, cross_entropy(scores, labels, reduction="none")
                hits, losses = accelerator.gather_for_metrics(metrics)
                loss += losses.sum()
                correct += hits.sum()
                count += len(hits)
            result = (loss / count).item() + (correct / count).item()
        accelerator.free_memory()
        return result

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()


def forget_state() -> None:
    """Forget the state that all objects of the library share."""
    state = import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
