"""Train a compiled model, save its weights in shards, and load them into an uncompiled model."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator, load_checkpoint_in_model
from trainer_lib.utils import DataLoaderConfiguration, set_seed


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        dynamo_backend=arguments.dynamo_backend,
    )
    set_seed(arguments.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))

    losses: list[float] = []
    for _ in range(arguments.epochs):
        model.train()
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    accelerator.save_model(model, arguments.output_dir, max_shard_size=arguments.max_shard_size)
    accelerator.wait_for_everyone()

    again = make_model().to(accelerator.device)
    load_checkpoint_in_model(again, arguments.output_dir, device_map={"": str(accelerator.device)})
    if accelerator.is_main_process:
        saved, read = unwrapped.state_dict(), again.state_dict()
        figures = {
            "losses": losses,
            "kind": type(unwrapped).__name__,
            "names": list(saved),
            "equal": saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in saved),
        }
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def make_model() -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 3))


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 192 points of three kinds."""
    inputs = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--dynamo_backend", default="eager")
    parser.add_argument("--max_shard_size", default="1KB", help="how large a part of the saved weights may be")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
