"""A small vision transformer reads handwritten digits.

    python examples/vit_digits.py
    trainer-lib launch --cpu --num_processes 2 examples/vit_digits.py
    trainer-lib report runs

An image of 8 by 8 pixels becomes 16 patches of 2 by 2. At the end it shows which patches the network looks at.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments

WIDTH, PATCHES, CLASSES = 48, 16, 10


class VisionTransformer(nn.Module):
    """Reads an image as a sequence of patches, and gathers what it saw by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.importance = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches, shares = self.look(images)
        return self.head((patches * shares).sum(dim=1))

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches after all blocks, and the share of each in the answer."""
        patches = self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.positions)
        return patches, self.importance(patches).softmax(dim=1)


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = torch.tensor(labels)
    torch.manual_seed(0)
    model = VisionTransformer()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=256,
            learning_rate=3e-3,
            weight_decay=0.05,
            lr_scheduler="cosine",
            warmup="10%",
        ),
        train_dataset=(images[:1437], digits[:1437]),
        eval_dataset=(images[1437:], digits[1437:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
    )
    result = trainer.fit()
    if trainer.accelerator.is_main_process:
        print(f"\n{result}\n")
        show(model, images[1437:1441])
    trainer.accelerator.end_training()


@torch.no_grad()
def show(model: VisionTransformer, images: Tensor) -> None:
    """Draw images, and below each the patches it was told by: the darker, the more they counted."""
    device = model.positions.device
    shares = model.eval().look(images.to(device))[1].reshape(-1, 1, 4, 4).cpu()
    shares = (shares / shares.amax(dim=(2, 3), keepdim=True)).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    for pictures in (images, shares):
        for row in range(8):
            print(
                "   ".join("".join(" ░▒▓█"[int(4 * x)] * 2 for x in picture[0, row]) for picture in pictures).rstrip()
            )
        print()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits with a vision transformer.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
