"""Hugging Face's Trainer."""

import tempfile
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from benchmarks.contestants.accelerate import forget_state
from benchmarks.contestants.base import Contestant, around
from benchmarks.meters import Meter
from benchmarks.task import BATCH_SIZE, LOG_EVERY, MAX_NORM, Task, optimization, weights_norm

_COMMON = {"report_to": "none", "dataloader_pin_memory": False}


class HuggingFace(Contestant):
    """`transformers.Trainer`: no reports, no checkpoints, batches as they are, no search for NaN in the losses."""

    name = "Hugging Face Trainer"
    package = "transformers"
    statement = "from transformers import Trainer"

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        transformers = import_module("transformers")
        model = task.model()

        def compute_loss(model: Any, batch: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            del return_outputs, num_items_in_batch
            return task.shape.loss(model, batch)

        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(
                    folder,
                    num_train_epochs=1,
                    gradient_accumulation_steps=task.accumulation,
                    max_grad_norm=MAX_NORM,
                    logging_steps=LOG_EVERY,
                    disable_tqdm=not task.bar,
                    save_strategy="no",
                    logging_nan_inf_filter=False,
                    ddp_find_unused_parameters=False,
                    use_cpu=task.device == "cpu",
                    **_COMMON,
                ),
                train_dataset=task.loader().dataset,
                optimizers=optimization(model),
                callbacks=[around(transformers.TrainerCallback, "on_epoch_begin", "on_epoch_end", meter)],
            )
            if task.shape.loss_fn is not None:
                trainer.compute_loss = compute_loss
            trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(task.loader())
            trainer.train()
        return weights_norm(model)

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Evaluate, with `compute_metrics`; what is kept of the scores is which is the highest."""
        transformers = import_module("transformers")

        class Model(nn.Module):
            def forward(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
                return {"loss": cross_entropy(scores, labels), "logits": scores}

        def collate(rows: list[Any]) -> dict[str, Tensor]:
            return dict(zip(("scores", "labels"), default_collate(rows), strict=True))

        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                Model(),
                transformers.TrainingArguments(
                    folder,
                    per_device_eval_batch_size=BATCH_SIZE,
                    remove_unused_columns=False,
                    label_names=["labels"],
                    disable_tqdm=True,
                    use_cpu=task.device == "cpu",
                    **_COMMON,
                ),
                data_collator=collate,
                compute_metrics=lambda all: {"accuracy": float((all.predictions == all.label_ids).mean())},
                preprocess_logits_for_metrics=lambda scores, _: scores.argmax(-1),
            )
            trainer.evaluate(task.scores(2).dataset)
            dataset = task.scores().dataset
            with meter:
                metrics = trainer.evaluate(dataset)
        return metrics["eval_loss"] + metrics["eval_accuracy"]

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()
