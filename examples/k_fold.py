"""Cross-validation: five trainings, each evaluated on another fifth of the data.

    python examples/k_fold.py
    trainer-lib launch --cpu --num_processes 2 examples/k_fold.py
    trainer-lib report runs

The spread of the five accuracies says how far to trust one of them. The report compares the five runs.
"""

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import PartialState, Trainer, TrainingArguments


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    folds = StratifiedKFold(n_splits=5, shuffle=True, random_state=0).split(pixels, labels)

    accuracies: list[float] = []
    for fold, (seen, unseen) in enumerate(folds, start=1):
        torch.manual_seed(0)  # each fold starts from the same weights
        trainer = Trainer(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            TrainingArguments(
                output_dir=options.output_dir,
                run_name=f"fold {fold}",
                num_train_epochs=options.num_train_epochs,
                per_device_train_batch_size=16,
                global_batch_size=32,  # on one process or two
                per_device_eval_batch_size=256,
                learning_rate=3e-3,
                progress_bar=False,
            ),
            train_dataset=(images[seen], digits[seen]),
            eval_dataset=(images[unseen], digits[unseen]),
            loss_fn=cross_entropy,
            metrics=["accuracy"],
        )
        accuracies.append(trainer.fit().metrics["eval_accuracy"])
        PartialState().print(f"fold {fold}: accuracy {accuracies[-1]:.2%}")
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
    PartialState().print(f"\nall folds: accuracy {mean:.2%} ± {spread:.2%}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits, five times.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
