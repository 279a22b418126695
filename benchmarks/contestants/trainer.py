"""This library's `Trainer`."""

import shutil
import tempfile
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer_lib import forget_state
from benchmarks.meters import Meter
from benchmarks.task import BATCH_SIZE, LOG_EVERY, MAX_NORM, Task, optimization, weights_norm


class Trainer(Contestant):
    """`trainer_lib.Trainer`, with all callbacks that are there by default."""

    name = "trainer_lib"
    statement = "from trainer_lib import Trainer"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train with the optimizer and the schedule of the others."""
        model = task.model()
        optimizer, scheduler = optimization(model)
        return self._fit(task, meter, model, train_dataset=task.loader(), optimizer=optimizer, scheduler=scheduler)

    def fit_by_default(self, task: Task, meter: Meter) -> float:
        """Train with what arguments make."""
        return self._fit(
            task,
            meter,
            task.model(),
            train_dataset=task.loader().dataset,
            per_device_train_batch_size=BATCH_SIZE,
            shuffle=False,
            learning_rate=1e-3,
            weight_decay=0.01,
            schedule_steps=1_000_000,
        )

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Evaluate by a metric that is called by its name."""
        from trainer_lib import Trainer, TrainingArguments

        arguments = TrainingArguments(
            per_device_eval_batch_size=BATCH_SIZE, progress_bar=False, use_cpu=task.device == "cpu"
        )
        trainer = Trainer(nn.Identity(), arguments, loss_fn=cross_entropy, metrics="accuracy")
        trainer.evaluate(task.scores(2).dataset)
        dataset = task.scores().dataset
        with meter:
            metrics = trainer.evaluate(dataset)
        return metrics["eval_loss"] + metrics["eval_accuracy"]

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()

    def _fit(self, task: Task, meter: Meter, model: Any, train_dataset: Any, **options: Any) -> float:
        from trainer_lib import Trainer, TrainingArguments
        from trainer_lib.callbacks import LambdaCallback

        objects = {name: options.pop(name) for name in ("optimizer", "scheduler") if name in options}
        folder = tempfile.mkdtemp() if task.folder else None
        arguments = TrainingArguments(
            num_train_epochs=1,
            gradient_accumulation_steps=task.accumulation,
            max_grad_norm=MAX_NORM,
            log_every=LOG_EVERY,
            progress_bar=task.bar,
            use_cpu=task.device == "cpu",
            output_dir=folder,
            **options,
        )
        around = LambdaCallback(on_epoch_begin=lambda _: meter.start(), on_epoch_end=lambda _: meter.stop())
        trainer = Trainer(
            model, arguments, train_dataset=train_dataset, loss_fn=task.shape.loss_fn, callbacks=[around], **objects
        )
        trainer.fit()
        if folder is not None:
            shutil.rmtree(folder)
        return weights_norm(model)
