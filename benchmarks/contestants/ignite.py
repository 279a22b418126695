"""PyTorch-Ignite."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.contestants.bare import loader_by_hand, parts_by_hand
from benchmarks.contestants.base import Contestant, NotOfferedError
from benchmarks.meters import Meter
from benchmarks.task import LOG_EVERY, MAX_NORM, Task, weights_norm


class Ignite(Contestant):
    """`ignite.engine.Engine`, which drives a step that is written by hand."""

    name = "Ignite"
    package = "ignite"
    statement = "from ignite.engine import Engine"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        engine_module = import_module("ignite.engine")
        model, optimizer, scheduler, loader = parts_by_hand(task)
        steps, total, loss_of = task.accumulation, torch.zeros((), device=task.device), task.shape.loss
        if steps > 1 and isinstance(model, DistributedDataParallel):
            raise NotOfferedError

        def step(engine: Any, batch: Any) -> Tensor:
            loss = loss_of(model, batch)
            (loss if steps == 1 else loss / steps).backward()
            if engine.state.iteration % steps == 0:
                clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total.add_(loss.detach())
            return loss

        engine, events = engine_module.Engine(step), engine_module.Events
        engine.add_event_handler(events.EPOCH_STARTED, meter.start)
        engine.add_event_handler(events.EPOCH_COMPLETED, meter.stop)
        engine.add_event_handler(events.ITERATION_COMPLETED(every=LOG_EVERY), lambda: print(total.item()))
        if task.bar:
            import_module("ignite.handlers").ProgressBar(persist=True).attach(engine)
        engine.run(loader, max_epochs=1)
        return weights_norm(model)

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Evaluate with its metrics."""
        metrics = import_module("ignite.metrics")
        evaluator = import_module("ignite.engine").create_supervised_evaluator(
            nn.Identity(), {"loss": metrics.Loss(cross_entropy), "accuracy": metrics.Accuracy()}
        )
        evaluator.run(loader_by_hand(task, task.scores(2)))
        loader = loader_by_hand(task, task.scores())
        with meter:
            results = evaluator.run(loader).metrics
        return results["loss"] + results["accuracy"]
