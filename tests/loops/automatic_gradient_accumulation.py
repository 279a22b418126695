"""Find the batch size that fits into memory, and make up for it by gradient accumulation."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, find_executable_batch_size, set_seed


class Network(nn.Module):
    """A regression whose activations of more than `fits` samples are more than any machine can hold."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits = fits
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.fits:
            torch.empty(2**55, dtype=torch.uint8, device=inputs.device)
        return self.layers(inputs).squeeze(-1)


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    observed_batch_size = int(arguments.batch_size)
    tried: list[int] = []
    losses: list[float] = []

    def halved() -> int:
        return tried[-1] // 2

    @find_executable_batch_size(starting_batch_size=observed_batch_size, reduce_batch_size_fn=halved)
    def inner_training_loop(batch_size: int) -> None:
        accelerator.free_memory()
        tried.append(batch_size)
        losses.clear()
        accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
        set_seed(arguments.seed)

        model = Network(arguments.fits // accelerator.num_processes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = make_loader(batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(arguments.epochs):
            model.train()
            window = torch.zeros((), device=accelerator.device)
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                window += loss.detach()
                if accelerator.sync_gradients:
                    window = accelerator.reduce(window, reduction="mean") / accelerator.gradient_accumulation_steps
                    losses.append(window.item())
                    window = torch.zeros_like(window)

    inner_training_loop()
    if accelerator.is_main_process:
        figures = {"tried": tried, "steps": accelerator.gradient_accumulation_steps, "losses": losses}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 512 noisy samples of a function of 8 variables."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=generator)
    targets = inputs.sin().sum(dim=1) + 0.1 * torch.randn(512, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=128, help="of one update, all processes together")
    parser.add_argument("--fits", type=int, default=32, help="how many samples all processes together can hold")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write batch sizes and losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
