"""Distributed evaluation: any number of ranks give the numbers of one, also where the dataset does not divide.

    python examples/by_feature/distributed_evaluation.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/distributed_evaluation.py
    trainer-lib launch --cpu --num_processes 3 examples/by_feature/distributed_evaluation.py

The three commands print the same table. 597 images do not divide by two; no image counts twice.
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
            output_dir=options.output_dir,
            max_steps=60,
            global_batch_size=48,  # on one rank, on two, and on three
            per_device_eval_batch_size=25,
            learning_rate=3e-3,
        ),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy", "f1_macro", "top3_accuracy"],
    )
    trainer.fit()
    logits, targets, _ = trainer.predict((images[1200:], digits[1200:]))  # all rows, in order, on every rank
    if trainer.accelerator.is_main_process:
        guesses = logits.argmax(axis=1)
        print(f"\n{len(targets)} images, each evaluated once")
        print("digit     " + "".join(f"{digit:>6}" for digit in range(10)) + "     all")
        shares = [(guesses == targets)[targets == digit].mean() for digit in range(10)]
        print("accuracy  " + "".join(f"{share:>6.0%}" for share in shares) + f"  {(guesses == targets).mean():>6.2%}")
    metrics = trainer.evaluate()
    lines = [f"{name:<22}{metrics[name]:.6f}" for name in ("eval_loss", "eval_accuracy", "eval_f1_macro")]
    trainer.accelerator.print("\n".join(lines))
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Evaluate on any number of ranks.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
