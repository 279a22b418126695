"""Train with gradients that DDP reduces in half precision."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    set_seed,
)


def main() -> None:
    arguments = parse_arguments()
    ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(arguments.comm_hook))
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[ddp_kwargs],
    )
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))

    losses: list[float] = []
    for _ in range(arguments.epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = accelerator.gather(weights[None])
    if accelerator.is_main_process:
        figures = {"losses": losses, "weights_agree": bool((every == every[0]).all())}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 256 points of three kinds."""
    inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--comm_hook", default="fp16", help="no, fp16, bf16, power_sgd or batched_power_sgd")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
