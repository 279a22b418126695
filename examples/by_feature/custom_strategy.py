"""A strategy of your own: ranks average their weights every few steps, instead of their gradients at each step.

    trainer-lib launch --cpu --num_processes 2 examples/by_feature/custom_strategy.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/custom_strategy.py --every 8

The end prints how much was sent, and that all ranks hold the same weights. On one process nothing is sent.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from trainer_lib import Accelerator, Trainer, TrainingArguments
from trainer_lib.options.base import KwargsHandler
from trainer_lib.strategies import SingleDevice, register_strategy


@dataclass
class AveragingKwargs(KwargsHandler):
    """Selects the strategy: `Accelerator(kwargs_handlers=[AveragingKwargs()])`."""

    every: int = 1


@register_strategy(AveragingKwargs)
class WeightAveraging(SingleDevice):
    """Each rank steps by its own gradients; every few steps the weights are averaged over all ranks.

    The rest is that of one device: the model stays as it is, and `backward` sends nothing.
    """

    options: AveragingKwargs
    sent = 0

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Begin with rank 0's weights on all ranks."""
        for parameter in model.parameters():
            self.group.broadcast(parameter.data)
        return model

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Average after the steps of each prepared optimizer."""
        steps = 0

        def average(stepped: Optimizer, *arguments: Any) -> None:
            nonlocal steps
            steps += 1
            if steps % self.options.every == 0:
                for group in stepped.param_groups:
                    self.average(group["params"])

        optimizer.register_step_post_hook(average)

    def average_weights(self, model: nn.Module) -> None:
        """Average now: the engine asks for it where ranks have to hold the same weights."""
        self.average(model.parameters())

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace weights by their mean over the ranks."""
        for parameter in parameters:
            self.sent += parameter.numel() * (self.group.size > 1)
            self.group.all_reduce(parameter.data).div_(self.group.size)

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Average the few numbers on which ranks agree at each update, such as a request to save or to stop."""
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        self._averages = (self.group.all_reduce(numbers) / self.group.size).tolist()

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Take the mean of the ranks' norms, so that all ranks skip a step that is not finite on one of them."""
        norm = super().grad_norm(parameters, norm_type, in_double=in_double)
        return self.group.all_reduce(norm) / self.group.size


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    accelerator = Accelerator(kwargs_handlers=[AveragingKwargs(every=options.every)])
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            progress_bar=False,
        ),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
        accelerator=accelerator,
    )
    trainer.fit()
    strategy = accelerator.strategy
    assert isinstance(strategy, WeightAveraging)
    strategy.average_weights(trainer.unwrapped_model)
    accuracy = trainer.evaluate()["eval_accuracy"]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.unwrapped_model.parameters()])
    (spread,) = (accelerator.gather(weights[None]) - weights).abs().max()[None]
    accelerator.print(f"\naccuracy {accuracy:.2%}, {strategy.sent:,} numbers sent by each rank")
    accelerator.print(f"largest difference between the weights of ranks: {spread:.1g}")
    accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train by averaging weights.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=5)
    parser.add_argument("--every", type=int, default=1, help="steps from one average to the next")
    return parser.parse_args()


if __name__ == "__main__":
    main()
