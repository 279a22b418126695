"""Save a checkpoint every few batches and each epoch, and resume from one."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


class Progress:
    """Where the training is: the epoch, and the batches of it that are done."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            project_dir=arguments.output_dir,
            automatic_checkpoint_naming=arguments.checkpointing_steps == "automatic",
            total_limit=arguments.total_limit,
        ),
    )
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    loader = make_loader(arguments.batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if arguments.resume_from_checkpoint:
        latest = arguments.resume_from_checkpoint == "latest"
        accelerator.load_state(None if latest else arguments.resume_from_checkpoint)
        accelerator.print(f"resumed in epoch {progress.epoch} after {progress.batches} batches")

    figures: dict[str, Any] = {"start": [progress.epoch, progress.batches], "losses": {}}
    model.train()
    while progress.epoch < arguments.epochs:
        loader.set_epoch(progress.epoch)
        rest = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
        for inputs, labels in rest:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean().item()
            figures["losses"][f"{progress.epoch}.{progress.batches}"] = mean
            progress.batches += 1
            save_sometimes(accelerator, arguments, progress)
        progress.epoch, progress.batches = progress.epoch + 1, 0
        if arguments.checkpointing_steps == "epoch":
            accelerator.save_state(Path(arguments.output_dir) / f"epoch_{progress.epoch - 1}")
        elif arguments.checkpointing_steps == "automatic":
            accelerator.save_state()

    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict()
        figures["weights"] = {name: tensor.tolist() for name, tensor in weights.items()}
        figures["rate"] = scheduler.get_last_lr()[0]
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def save_sometimes(accelerator: Accelerator, arguments: argparse.Namespace, progress: Progress) -> None:
    """Save the state if it is time to, counted in batches."""
    if arguments.checkpointing_steps.isdigit():
        total = progress.epoch * arguments.batches_an_epoch + progress.batches
        if total % int(arguments.checkpointing_steps) == 0:
            accelerator.save_state(Path(arguments.output_dir) / f"step_{total}")


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 160 points of three kinds."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(160, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size, shuffle=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16, help="of all processes together")
    parser.add_argument(
        "--checkpointing_steps", default="never", help="a number of batches, 'epoch', 'automatic' or 'never'"
    )
    parser.add_argument("--total_limit", type=int, help="how many states to keep of those with automatic names")
    parser.add_argument(
        "--resume_from_checkpoint", help="the folder of a saved state, or 'latest' with automatic names"
    )
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses and weights")
    arguments = parser.parse_args()
    arguments.batches_an_epoch = 160 // arguments.batch_size
    return arguments


if __name__ == "__main__":
    main()
