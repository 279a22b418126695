"""A callback of your own: it shows which digits are hard, after each evaluation, and ends the run when none is.

python examples/by_feature/custom_callback.py
trainer-lib launch --cpu --num_processes 2 examples/by_feature/custom_callback.py
trainer-lib report runs
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Callback, Run, Trainer, TrainingArguments


def recall(prediction: Any) -> dict[str, float]:
    """Return the share of the images of each digit that are read right."""
    logits, labels = prediction
    right = logits.argmax(axis=1) == labels
    return {f"recall_{digit}": float(right[labels == digit].mean()) for digit in range(10)}


class HardDigits(Callback):
    """Prints the digits that are read worst, and stops once all are read well enough."""

    def __init__(self, enough: float) -> None:
        self.enough = enough

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        shares = {digit: metrics[f"eval_recall_{digit}"] for digit in range(10)}
        hardest = sorted(shares, key=lambda digit: shares[digit])[:3]
        if run.accelerator.is_main_process:
            told = ", ".join(f"{digit} ({shares[digit]:.0%})" for digit in hardest)
            print(f"epoch {run.state.epoch:.0f}: hardest are {told}")
        if min(shares.values()) >= self.enough:
            run.control.reason = f"each digit is read right in {self.enough:.0%} of its images or more"
            run.control.stop = True


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=20,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            progress_bar=False,
        ),
        train_dataset=(images[:1437], digits[:1437]),
        eval_dataset=(images[1437:], digits[1437:]),
        loss_fn=cross_entropy,
        compute_metrics=recall,
        callbacks=[HardDigits(options.enough)],
    )
    result = trainer.fit()
    trainer.accelerator.print(f"\n{result}\n\nThe run {result.status}: {result.state.reason}")
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits until none is hard.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--enough", type=float, default=0.7, help="the share of each digit to read right")
    return parser.parse_args()


if __name__ == "__main__":
    main()
