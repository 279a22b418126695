"""Distillation: a small network learns from the answers of a large one, by a `compute_loss` of your own.

    python examples/distillation.py
    trainer-lib launch --cpu --num_processes 2 examples/distillation.py
    trainer-lib report runs

A teacher learns handwritten digits from 1,437 labels. Of two equal students one learns from 100 labels, and the other
from the teacher's probabilities for all images, without a label.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from trainer_lib import PartialState, Trainer, TrainingArguments

LABELS, TEMPERATURE = 100, 3.0


class DistillationTrainer(Trainer):
    """Trains a student to give the probabilities that a teacher gives."""

    teacher: nn.Module

    def compute_loss(self, model: Any, batch: Any) -> Any:
        """Return the distance between the two networks' probabilities, as a mean over the images."""
        images, _ = batch  # the labels are not used
        logits = model(images)
        with torch.no_grad():
            wanted = (self.teacher(images) / TEMPERATURE).softmax(dim=1)
        loss = kl_div((logits / TEMPERATURE).log_softmax(dim=1), wanted, reduction="batchmean")
        return loss * TEMPERATURE**2, logits


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    training, validation = (images[:1437], digits[:1437]), (images[1437:], digits[1437:])
    few = (images[:LABELS], digits[:LABELS])

    teacher = make_network(256)
    epochs = options.num_train_epochs
    accuracy = {"teacher, all labels": train(Trainer, teacher, training, validation, epochs, options)}
    # As many updates as the student that sees all images.
    alone = epochs * len(training[0]) / LABELS
    accuracy[f"student, {LABELS} labels"] = train(Trainer, make_network(16), few, validation, alone, options)
    DistillationTrainer.teacher = teacher.eval().requires_grad_(False)
    accuracy["student, from the teacher"] = train(
        DistillationTrainer, make_network(16), training, validation, epochs, options
    )
    PartialState().print("\n" + "\n".join(f"{name:<28}{value:7.2%}" for name, value in accuracy.items()))


def train(
    trainer_class: type[Trainer],
    model: nn.Module,
    training: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    epochs: float,
    options: argparse.Namespace,
) -> float:
    """Train a network and return its accuracy on the validation set."""
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        eval_every="200 steps",
        save_every="200 steps",
        progress_bar=False,
    )
    trainer = trainer_class(
        model, args, train_dataset=training, eval_dataset=validation, loss_fn=cross_entropy, metrics=["accuracy"]
    )
    return trainer.fit().metrics["eval_accuracy"]


def make_network(width: int) -> nn.Module:
    """Return a network with one hidden layer, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Teach a small network with a large one.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
