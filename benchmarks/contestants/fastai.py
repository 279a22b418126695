"""fastai."""

from importlib import import_module
from typing import Any

from benchmarks.contestants.base import Contestant, NotOfferedError, around
from benchmarks.meters import Meter
from benchmarks.task import BATCH_SIZE, MAX_NORM, Task, optimization, weights_norm


class Fastai(Contestant):
    """`fastai.learner.Learner` on torch's own loader and optimizer: no validation, no printed table."""

    name = "fastai"
    package = "fastai"
    statement = "from fastai.learner import Learner"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        if task.device != "cpu" or task.world_size > 1 or not task.shape.has_tuples or task.folder:
            raise NotOfferedError
        learner, training = import_module("fastai.learner"), import_module("fastai.callback.training")
        callback, data = import_module("fastai.callback.core"), import_module("fastai.data.core")
        progress = import_module("fastai.callback.progress").ProgressCallback
        model, loader = task.model(), task.loader()
        optimizer, scheduler = optimization(model)

        def after_step(_: Any) -> None:
            scheduler.step()

        def before_validate(_: Any) -> None:
            raise callback.CancelValidException

        recorder = type("Own", (callback.Callback,), {"after_step": after_step, "before_validate": before_validate})
        learn = learner.Learner(
            data.DataLoaders(loader, loader),
            model,
            loss_func=task.shape.loss_fn,
            opt_func=lambda *_, **__: import_module("fastai.optimizer").OptimWrapper(opt=optimizer),
            lr=1e-3,
            cbs=[
                training.GradientClip(MAX_NORM),
                *([training.GradientAccumulation(task.accumulation * BATCH_SIZE)] if task.accumulation > 1 else []),
                recorder(),
                around(callback.Callback, "before_epoch", "after_train", meter),
            ],
        )
        shows = any(isinstance(callback, progress) for callback in learn.cbs)
        if shows != task.bar:
            (learn.add_cb if task.bar else learn.remove_cb)(progress)
        learn.logger = lambda *_: None
        learn.fit(1)
        return weights_norm(model)
