"""skorch."""

from importlib import import_module

from torch.nn import CrossEntropyLoss
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.contestants.base import Contestant, NotOfferedError, around
from benchmarks.meters import Meter
from benchmarks.shapes import TUPLES
from benchmarks.task import BATCH_SIZE, MAX_NORM, Task, rate, weights_norm


class Skorch(Contestant):
    """`skorch.NeuralNet`: no validation split, no printed table."""

    name = "skorch"
    package = "skorch"
    statement = "from skorch import NeuralNet"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        if task.accumulation > 1 or task.world_size > 1 or task.shape is not TUPLES or task.folder:
            raise NotOfferedError
        skorch, callbacks = import_module("skorch"), import_module("skorch.callbacks")
        network = skorch.NeuralNet(
            task.model(),
            criterion=CrossEntropyLoss,
            optimizer=AdamW,
            optimizer__foreach=True,
            lr=1e-3,
            max_epochs=1,
            batch_size=BATCH_SIZE,
            device=task.device,
            train_split=None,
            callbacks=[
                callbacks.GradientNormClipping(MAX_NORM),
                callbacks.LRScheduler(LambdaLR, lr_lambda=rate, step_every="batch"),
                *([callbacks.ProgressBar(detect_notebook=False)] if task.bar else []),
                around(callbacks.Callback, "on_epoch_begin", "on_epoch_end", meter),
            ],
            callbacks__print_log=None,
        )
        network.fit(task.loader().dataset, None)
        return weights_norm(network.module_)
