"""A `transformers.Trainer` and the Trainer of this library that train the same on the same data."""

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.checkpointing.test_foreign import language_model, texts
from trainer_lib import Trainer

SAVED_AT, STEPS = 7, 10  # 5 updates an epoch


def their_trainer(folder: Path, ranks: int = 1, dropout: bool = True, **options: Any) -> Any:
    """Return a `transformers.Trainer` that keeps the losses of its micro-batches in `losses`."""
    transformers: Any = importlib.import_module("transformers")

    class Recording(transformers.Trainer):
        """Records the loss of each micro-batch."""

        losses: list[float]

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            """Record the loss."""
            loss = super().training_step(*arguments, **options)
            self.losses.append(loss.item())
            return loss

    torch.manual_seed(0)
    model = language_model()
    set_dropout(model, dropout)
    args = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2 // ranks,
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "warmup_steps": 3,
            "lr_scheduler_type": "cosine",
            "train_sampling_strategy": "sequential",
            "save_steps": SAVED_AT,
            "logging_steps": 1,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "optim": "adamw_torch",
            **options,
        }
    )
    trainer = Recording(model=model, args=args, train_dataset=texts())
    trainer.losses = []
    return trainer


def set_dropout(model: Any, dropout: bool) -> None:
    """Switch dropout off, unless it is wanted: masks differ from rank to rank."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0


def logged(trainer: Any, after: int = 0) -> dict[int, float]:
    """Return the logged losses of a trainer of either library by step."""
    history = trainer.run.state.history if isinstance(trainer, Trainer) else trainer.state.log_history
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry and entry["step"] > after}


@contextmanager
def their_state() -> Generator[None]:
    """Reset the state that Accelerate leaves."""
    from accelerate.state import AcceleratorState, GradientState

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
