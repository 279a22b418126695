"""Train with local SGD: ranks update separately for a few steps before their weights are averaged."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.local_sgd import LocalSGD
from trainer_lib.utils import DataLoaderConfiguration, set_seed


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))

    losses: list[float] = []
    spreads: list[float] = []
    for _ in range(arguments.epochs):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=arguments.local_sgd_steps, enabled=True
        ) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = mse_loss(model(inputs).squeeze(-1), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        local_sgd.step()
                losses.append(accelerator.gather(loss.detach()).mean().item())
                spreads.append(spread(accelerator, model))
        spreads.append(spread(accelerator, model))

    if accelerator.is_main_process:
        Path(arguments.figures).write_text(json.dumps({"losses": losses, "spreads": spreads}))
    accelerator.end_training()


def spread(accelerator: Accelerator, model: nn.Module) -> float:
    """Return how far the processes' weights are apart."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = accelerator.gather(weights[None])
    return (every - every.mean(dim=0)).abs().max().item()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 256 samples of a function of 8 variables."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1)), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_sgd_steps", type=int, default=3, help="updates from one average to the next")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses and spreads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
