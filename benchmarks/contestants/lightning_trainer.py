"""Lightning's Trainer."""

from importlib import import_module
from typing import Any

from torch.nn.functional import cross_entropy

from benchmarks.contestants.bare import shared_by_hand
from benchmarks.contestants.base import Contestant, around
from benchmarks.meters import Meter
from benchmarks.task import LOG_EVERY, MAX_NORM, Task, optimization, weights_norm


class LightningTrainer(Contestant):
    """`lightning.Trainer`: no logger, no checkpoints; `self.log`, which costs as much again, is not called."""

    name = "Lightning Trainer"
    package = "lightning"
    statement = "from lightning import Trainer"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        lightning = import_module("lightning")
        module = lightning.LightningModule()
        module.model = task.model()
        optimizer, scheduler = optimization(module.model)
        module.configure_optimizers = lambda: (
            [optimizer],
            [{"scheduler": scheduler, "interval": "step"}],
        )

        def training_step(batch: Any) -> Any:
            return task.shape.loss(module.model, batch)

        module.training_step = training_step
        trainer = _trainer(
            task,
            max_epochs=1,
            accumulate_grad_batches=task.accumulation,
            gradient_clip_val=MAX_NORM,
            log_every_n_steps=LOG_EVERY,
            callbacks=[around(lightning.Callback, "on_train_epoch_start", "on_train_epoch_end", meter)],
        )
        trainer.fit(module, shared_by_hand(task, task.loader()))
        return weights_norm(module.model)

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Evaluate; means over batches of one size need no metric objects."""
        module = import_module("lightning").LightningModule()

        def validation_step(batch: Any) -> None:
            scores, labels = batch
            module.log("loss", cross_entropy(scores, labels), sync_dist=True, batch_size=len(labels))
            hits = (scores.argmax(1) == labels).float().mean()
            module.log("accuracy", hits, sync_dist=True, batch_size=len(labels))

        module.validation_step = validation_step
        trainer = _trainer(task, num_sanity_val_steps=0)
        trainer.validate(module, shared_by_hand(task, task.scores(2)), verbose=False)
        loader = shared_by_hand(task, task.scores())
        with meter:
            (metrics,) = trainer.validate(module, loader, verbose=False)
        return metrics["loss"] + metrics["accuracy"]


def _trainer(task: Task, **options: Any) -> Any:
    return import_module("lightning").Trainer(
        accelerator=task.device,
        devices=task.world_size,
        strategy="auto" if task.world_size == 1 else "ddp",
        use_distributed_sampler=False,  # its own shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=task.bar,
        enable_model_summary=False,
        **options,
    )
