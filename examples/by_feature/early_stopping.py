"""Early stopping: training ends when the validation loss no longer falls, and the best weights are loaded.

    python examples/by_feature/early_stopping.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/early_stopping.py

A large network and few images overfit within seconds, so there is something to stop.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import EarlyStopping


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=100,
            per_device_train_batch_size=20,
            learning_rate=3e-3,
            weight_decay=0.0,
            lr_scheduler="constant",
            metric_for_best="loss",
            load_best_at_end=True,
            progress_bar=False,
        ),
        train_dataset=(images[:200], digits[:200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
        callbacks=[EarlyStopping("eval_loss", patience=options.patience)],
    )
    result = trainer.fit()
    last = [entry["eval_loss"] for entry in result.history if "eval_loss" in entry][-1]
    best = trainer.evaluate()["eval_loss"]  # of the weights that were loaded at the end
    trainer.accelerator.print(
        f"\n{result}\n\nThe run {result.status} after {result.state.epoch:.0f} of 100 epochs: {result.state.reason}\n"
        f"Validation loss of the last weights {last:.4f}, of the best ones {best:.4f}."
    )
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Stop training when the validation loss no longer falls.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--patience", type=int, default=5, help="evaluations without a lower loss")
    return parser.parse_args()


if __name__ == "__main__":
    main()
