"""This file is a first training with the `Trainer`: handwritten digits and a small convolutional network.

    python examples/digits.py
    python examples/digits.py --output_dir runs --num_train_epochs 30
    trainer-lib launch --cpu --num_processes 2 examples/digits.py --global_batch_size 64

It shows a bar, evaluates after each epoch, keeps the best checkpoint if it is told where, and ends with a table.
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import EarlyStopping

Images = tuple[Tensor, Tensor]


def main() -> None:
    arguments = parse_arguments()
    training, validation = load_images()
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=arguments.output_dir or scratch,
            num_train_epochs=arguments.num_train_epochs,
            global_batch_size=arguments.global_batch_size,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=256,
            learning_rate=3e-3,
            weight_decay=0.01,
            lr_scheduler="cosine",
            warmup=0.1,
            metric_for_best="accuracy",
            load_best_at_end=True,
            keep_last=1,
        )
        trainer = Trainer(
            make_model(),
            args,
            train_dataset=training,
            eval_dataset=validation,
            loss_fn=nn.CrossEntropyLoss(label_smoothing=0.05),
            metrics=["accuracy"],
            callbacks=[EarlyStopping("accuracy", patience=8)],
        )
        result = trainer.fit()
        metrics = trainer.evaluate()
    if trainer.accelerator.is_main_process:
        print(result)
        print(f"accuracy of the best: {metrics['eval_accuracy']:.4f}")
    trainer.accelerator.end_training()


def load_images() -> tuple[Images, Images]:
    """Return training and validation images with their digits."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:1437], order[1437:]
    return (images[first], labels[first]), (images[rest], labels[rest])


def make_model() -> nn.Module:
    """Return a network of two convolutions, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(256, 10),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", help="where the run is kept (default: nowhere for long)")
    parser.add_argument("--num_train_epochs", type=int, default=15)
    parser.add_argument("--global_batch_size", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
