"""This file is Hugging Face's trainer."""

import tempfile
from importlib import import_module
from typing import Any

from torch.nn.functional import cross_entropy

from benchmarks.contestants.accelerate import forget_state
from benchmarks.contestants.base import Contestant, around
from benchmarks.meters import Meter
from benchmarks.task import LOG_EVERY, MAX_NORM, Task, optimization, weights_norm


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
            inputs, labels = batch
            return cross_entropy(model(inputs), labels)

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
                    use_cpu=True,
                    save_strategy="no",
                    report_to="none",
                    logging_nan_inf_filter=False,
                    ddp_find_unused_parameters=False,
                ),
                train_dataset=task.loader().dataset,
                optimizers=optimization(model),
                callbacks=[around(transformers.TrainerCallback, "on_epoch_begin", "on_train_end", meter)],
            )
            trainer.compute_loss = compute_loss
            trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(task.loader())
            trainer.train()
        return weights_norm(model)

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()
