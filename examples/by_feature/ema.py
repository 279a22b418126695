"""EMA: an exponential moving average of the weights is evaluated, saved and used at the end.

    python examples/by_feature/ema.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/ema.py
    trainer-lib report runs

Two runs with the same seed, high learning rate and noisy gradients: one evaluates its weights, the other their average.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Callback, PartialState, Run, Trainer, TrainingArguments
from trainer_lib.callbacks import EMA


class Accuracies(Callback):
    """Keeps the accuracy of each evaluation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Add one."""
        self.values.append(metrics["eval_accuracy"])


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    lines: list[str] = []
    for name, average in (("weights", []), ("average of the weights", [EMA(0.98)])):
        torch.manual_seed(0)
        accuracies = Accuracies()
        trainer = Trainer(
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
            TrainingArguments(
                output_dir=options.output_dir,
                run_name=name.replace(" ", "-"),
                num_train_epochs=options.num_train_epochs,
                per_device_train_batch_size=8,
                learning_rate=2e-2,
                lr_scheduler="constant",
                progress_bar=False,
            ),
            train_dataset=(images[:800], digits[:800]),
            eval_dataset=(images[800:], digits[800:]),
            loss_fn=cross_entropy,
            metrics=["accuracy"],
            callbacks=[accuracies, *average],
        )
        trainer.fit()
        lines.append(f"{name:<24}" + "".join(f"{accuracy:8.2%}" for accuracy in accuracies.values))
    PartialState().print("\naccuracy after each epoch\n" + "\n".join(lines))
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare weights with their moving average.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
