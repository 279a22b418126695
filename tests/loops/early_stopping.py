"""Stop the training on all ranks when one rank finds that the loss is low enough."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, set_seed


class Patience:
    """Tells when the loss has not got better for some time."""

    def __init__(self, patience: int, min_delta: float) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.waited = 0

    def is_lost(self, loss: float) -> bool:
        if loss < self.best - self.min_delta:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))
    patience = Patience(arguments.patience, arguments.min_delta)

    losses: list[float] = []
    stopped = False
    for _ in range(arguments.epochs):
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            # Only one process looks; the trigger tells the others.
            if accelerator.is_last_process and patience.is_lost(losses[-1]):
                accelerator.set_trigger()
            stopped = accelerator.check_trigger()
            if stopped:
                break
        if stopped:
            break

    steps = accelerator.gather(torch.tensor([len(losses)], device=accelerator.device)).tolist()
    if accelerator.is_main_process:
        figures = {"losses": losses, "stopped": stopped, "steps": steps}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 256 points, of which one side is labelled."""
    inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--patience", type=int, default=6, help="batches without a better loss")
    parser.add_argument("--min_delta", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses and steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
