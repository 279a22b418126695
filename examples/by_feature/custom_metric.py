"""Metrics of your own, exact on any number of ranks: a function, and an object that the ranks merge.

    python examples/by_feature/custom_metric.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/custom_metric.py

A network reads handwritten digits. Its calibration is measured: of the digits that it is 90 % sure of, 90 % should be
right. The table is computed batch by batch, so memory does not grow with the dataset.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments

BINS = 10


def confidence(predictions: Tensor, labels: Tensor) -> Tensor:
    """Return one value for each row; the evaluation averages them over all rows."""
    return predictions.softmax(dim=1).max(dim=1).values


class Calibration:
    """The expected calibration error: how far confidence and accuracy are apart, as a mean over the rows."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start an evaluation."""
        self.rows, self.right, self.confidence = torch.zeros(3, BINS, dtype=torch.float64)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch."""
        confidence, guesses = predictions.softmax(dim=1).max(dim=1)
        bins = (confidence * BINS).long().clamp(max=BINS - 1).cpu()
        self.rows += torch.bincount(bins, minlength=BINS)
        self.right += torch.bincount(bins, (guesses == labels).double().cpu(), minlength=BINS)
        self.confidence += torch.bincount(bins, confidence.double().cpu(), minlength=BINS)

    def merge(self, others: list["Calibration"]) -> None:
        """Add what the other ranks counted."""
        for other in others:
            self.rows += other.rows
            self.right += other.right
            self.confidence += other.confidence

    def compute(self) -> float:
        """Return the error over all rows of all ranks."""
        return float((self.right - self.confidence).abs().sum() / self.rows.sum())

    def table(self) -> str:
        """Return a line for each bin that has rows."""
        lines: list[str] = []
        for index in range(BINS):
            rows = float(self.rows[index])
            if rows:
                sure, right = float(self.confidence[index]) / rows, float(self.right[index]) / rows
                lines.append(f"{rows:5.0f} digits   sure {sure:4.0%}   right {right:4.0%}   {'█' * round(30 * right)}")
        return "\n".join(lines)


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            metric_for_best="calibration_error",
            greater_is_better=False,
        ),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics={"accuracy": "accuracy", "confidence": confidence, "calibration_error": Calibration()},
    )
    result = trainer.fit()
    trainer.accelerator.print(f"\n{result}\n")

    logits, truth, _ = trainer.predict((images[1200:], digits[1200:]))  # all rows, on every rank
    calibration = Calibration()
    calibration.update(torch.from_numpy(logits), torch.from_numpy(truth))
    trainer.accelerator.print(calibration.table())
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure how well a network knows what it does not know.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
