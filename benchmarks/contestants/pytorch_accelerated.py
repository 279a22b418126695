"""pytorch-accelerated."""

from importlib import import_module
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from benchmarks.contestants.accelerate import forget_state
from benchmarks.contestants.base import Contestant, NotOfferedError, around
from benchmarks.meters import Meter
from benchmarks.task import BATCH_SIZE, MAX_NORM, Task, optimization, rate, weights_norm


class PytorchAccelerated(Contestant):
    """`pytorch_accelerated.Trainer`: no callbacks but the bar; it clips values, so clipping by norm is written in."""

    name = "pytorch-accelerated"
    package = "pytorch_accelerated"
    statement = "from pytorch_accelerated import Trainer"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        if not task.shape.has_tuples or task.folder:
            raise NotOfferedError  # its loop takes a batch apart by position
        library, callbacks = import_module("pytorch_accelerated"), import_module("pytorch_accelerated.callbacks")
        accelerate = import_module("accelerate")
        model = task.model()
        shown = [callbacks.ProgressBarCallback] if task.bar else []

        def create_accelerator(_: Any) -> Any:
            return accelerate.Accelerator(cpu=task.device == "cpu")

        trainer = type("Own", (library.Trainer,), {"_create_accelerator": create_accelerator})(
            model,
            loss_func=task.shape.loss_fn,
            optimizer=optimization(model)[0],
            callbacks=[*shown, around(callbacks.TrainerCallback, "on_train_epoch_start", "on_train_epoch_end", meter)],
        )

        def optimizer_step() -> None:
            trainer._accelerator.clip_grad_norm_(trainer.model.parameters(), MAX_NORM)
            trainer.optimizer.step()

        def make_schedule(optimizer: Any) -> LambdaLR:
            return LambdaLR(optimizer, rate)

        trainer.optimizer_step = optimizer_step
        trainer.train(
            task.loader().dataset,
            num_epochs=1,
            per_device_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=task.accumulation,
            create_scheduler_fn=make_schedule,
            train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
        )
        return weights_norm(model)

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()
