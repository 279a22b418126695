"""A GAN on a page: two models, two optimizers, and a custom training step.

    python examples/gan.py
    trainer-lib launch --cpu --num_processes 2 examples/gan.py

The generator paints handwritten digits of 8 by 8 pixels, and the discriminator learns to tell them from real ones. At
the end a classifier that saw only real digits reads what was painted.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from trainer_lib import Trainer, TrainingArguments

NOISE, CLASSES, PIXELS = 16, 10, 64


class GanTrainer(Trainer):
    """Trains a generator and a discriminator in turns."""

    def training_step(self, model: Any, batch: Any) -> None:
        """Update the discriminator, then the generator."""
        real, digits = batch
        kinds = one_hot(digits, CLASSES).float()
        noise = torch.randn(len(real), NOISE, device=real.device)
        painted = model["generator"](torch.cat([noise, kinds], dim=1))

        verdict_on_real = model["discriminator"](torch.cat([real, kinds], dim=1))
        verdict_on_painted = model["discriminator"](torch.cat([painted.detach(), kinds], dim=1))
        loss = against(verdict_on_real, 0.9) + against(verdict_on_painted, 0.0)  # 0.9: it is not to be too sure
        self.update("discriminator", loss)

        fooled = against(model["discriminator"](torch.cat([painted, kinds], dim=1)), 1.0)
        self.update("generator", fooled)

        self.log("discriminator_loss", loss, weight=len(real))
        self.log("generator_loss", fooled, weight=len(real))

    def update(self, name: str, loss: Tensor) -> None:
        """Update one of the models."""
        self.backward(loss, optimizer=name)
        self.optimizers[name].step()
        for optimizer in self.optimizers.values():  # the generator's loss reaches the discriminator too
            optimizer.zero_grad()


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    models = make_models()
    args = TrainingArguments(
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=32,
        drop_last=True,
        optimizer="adam",
        optimizer_kwargs={"betas": (0.5, 0.99)},
        learning_rate=2e-3,
        max_grad_norm=None,
        log_every="10 epochs",
    )
    trainer = GanTrainer(models, args, train_dataset=(images, digits))
    result = trainer.fit()

    if trainer.accelerator.is_main_process:
        classifier = LogisticRegression(max_iter=1000).fit(images.numpy(), labels)
        asked = torch.arange(CLASSES).repeat(50)
        painted = paint(models["generator"], asked)
        read = (torch.tensor(classifier.predict(painted.numpy())) == asked).float().mean()
        print(f"\n{result}\n")
        draw(painted[:5])
        draw(painted[5:10])
        print(f"The classifier reads {read:.1%} of {len(asked)} painted digits as they were meant (chance: 10 %).")
    trainer.accelerator.end_training()


def make_models() -> dict[str, nn.Module]:
    """Return both models, with the same weights each time."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE + CLASSES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, PIXELS), nn.Tanh()
    )
    discriminator = nn.Sequential(
        *(nn.Linear(PIXELS + CLASSES, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)),
    )
    return {"generator": generator, "discriminator": discriminator}


def against(verdict: Tensor, truth: float) -> Tensor:
    """Return how wrong a verdict is."""
    return binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))


@torch.no_grad()
def paint(generator: nn.Module, digits: Tensor) -> Tensor:
    """Return an image of each digit."""
    noise = torch.randn(len(digits), NOISE, generator=torch.Generator().manual_seed(0))
    device = next(generator.parameters()).device
    return generator.eval()(torch.cat([noise, one_hot(digits, CLASSES)], dim=1).to(device)).cpu()


def draw(images: Tensor) -> None:
    """Print images side by side."""
    shades = ((images.reshape(-1, 8, 8) + 1) * 2.49).long()
    for row in range(8):
        print("".join("".join(" ░▒▓█"[int(shade)] * 2 for shade in image[row]) for image in shades).rstrip())
    print()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to paint handwritten digits.")
    parser.add_argument("--num_train_epochs", type=float, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    main()
