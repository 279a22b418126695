"""Hyperparameter search: optuna proposes arguments, and each trial is a run like any other.

    pip install '.[sklearn,search]'
    python examples/by_feature/hyperparameter_search.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/hyperparameter_search.py

All trials start from the same weights. The best arguments then train once more, and give the same number.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        TrainingArguments(
            output_dir=options.output_dir, num_train_epochs=3, per_device_train_batch_size=32, progress_bar=False
        ),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
    )
    space = {
        "learning_rate": (1e-4, 1e-1, "log"),
        "weight_decay": (1e-4, 1e-1, "log"),
        "lr_scheduler": ["linear", "cosine", "constant"],
    }
    search = trainer.search(space, n=options.trials, metric="accuracy")
    trainer.accelerator.print(f"\n{search}\n")

    trainer.args = search.args
    accuracy = trainer.fit().metrics["eval_accuracy"]
    trainer.accelerator.print(f"\nbest trial {search.best_value:.4f}, trained once more {accuracy:.4f}")
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Search for a learning rate, a weight decay and a schedule.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--trials", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    main()
