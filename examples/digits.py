"""A first training with the `Trainer`: a small convolutional network reads handwritten digits.

    python examples/digits.py
    python examples/digits.py --output_dir runs --num_train_epochs 30
    trainer-lib launch --cpu --num_processes 2 examples/digits.py

It evaluates after each epoch, keeps the best checkpoint, and ends with what it learned. Two
processes learn the same as one: an update is made of 64 images, however many processes share them.
"""

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import EarlyStopping

Images = tuple[Tensor, Tensor]
Numbers = np.ndarray[Any, Any]


def main() -> None:
    options = parse_options()
    training, validation = load_images()

    with tempfile.TemporaryDirectory() as scratch:
        # 1. What can be said about a run without an object. Two processes take 32 of the 64 images each; one takes
        # them in two halves, and adds up the gradients.
        args = TrainingArguments(
            output_dir=options.output_dir or scratch,
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=256,
            global_batch_size=64,
            learning_rate=5e-3,
            weight_decay=0.01,
            lr_scheduler="cosine",
            warmup="10%",
            metric_for_best="accuracy",
            load_best_at_end=True,
        )

        # 2. A plain module, tensors, a loss function. No loop to write, no device to name.
        trainer = Trainer(
            make_model(),
            args,
            train_dataset=training,
            eval_dataset=validation,
            loss_fn=cross_entropy,
            metrics=["accuracy"],
            callbacks=[EarlyStopping("eval_accuracy", patience=8)],
        )

        # 3. Train; then read all images of the validation set with the best weights.
        result = trainer.fit()
        predictions, digits, _ = trainer.predict(validation)

    if trainer.accelerator.is_main_process:
        print(f"\n{result}\n")
        report(validation[0], predictions.argmax(axis=1), digits)
    trainer.accelerator.end_training()


def load_images() -> tuple[Images, Images]:
    """Return scikit-learn's 1,797 images of 8 by 8 pixels with their digits: four fifths to train on, and the rest."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    seen, unseen = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (images[seen], labels[seen]), (images[unseen], labels[unseen])


def make_model() -> nn.Module:
    """Return a network of two convolutions, with the same weights each time.

    It normalizes each image by itself: statistics over a batch would depend on who shares it.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 10),
    )


def report(images: Tensor, guesses: Numbers, digits: Numbers) -> None:
    """Print how many images of each digit were told right, and draw the first that were not."""
    print("digit     " + "".join(f"{digit:>6}" for digit in range(10)) + "     all")
    right = [(guesses == digits)[digits == digit].mean() for digit in range(10)]
    print("accuracy  " + "".join(f"{share:>6.0%}" for share in right) + f"  {(guesses == digits).mean():>6.2%}")
    wrong = np.flatnonzero(guesses != digits)[:4]
    if not len(wrong):
        return
    print("\nIt was wrong about:")
    print("   ".join(f"{digits[index]} taken for {guesses[index]}".ljust(16) for index in wrong))
    for row in range(8):
        pixels = [[" ░▒▓█"[int(4 * pixel)] * 2 for pixel in images[index, 0, row]] for index in wrong]
        print("   ".join("".join(line) for line in pixels).rstrip())


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--output_dir", help="where runs are kept (default: nowhere for long)")
    parser.add_argument("--num_train_epochs", type=float, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
