"""Train a model that FSDP shards over the ranks.

A plugin (`--plugin`) holds the options of sharding, or the environment does: ACCELERATE_USE_FSDP and FSDP_*.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.utils import DataLoaderConfiguration, set_seed


class Block(nn.Module):
    """A layer with a detour."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(self.norm(inputs))


class Network(nn.Module):
    """A few blocks between two layers."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def main() -> None:
    arguments = parse_arguments()
    plugin = None
    if arguments.plugin:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type=arguments.state_dict_type,
        )
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        fsdp_plugin=plugin,
    )
    set_seed(arguments.seed)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))

    held = sum(parameter.numel() for parameter in map(local_part, model.parameters()))
    start = 0
    if arguments.resume_from_checkpoint:
        accelerator.load_state(arguments.resume_from_checkpoint)
        start = int(Path(arguments.resume_from_checkpoint).name.removeprefix("epoch_")) + 1

    losses: list[float] = []
    norms: list[float] = []
    for epoch in range(start, arguments.epochs):
        model.train()
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.save_state(Path(arguments.output_dir) / f"epoch_{epoch}")

    # All processes have to ask; the main one gets the weights.
    weights = accelerator.get_state_dict(model)
    accelerator.save(weights, Path(arguments.output_dir) / "weights.safetensors", safe_serialization=True)
    if accelerator.is_main_process:
        figures = {
            "distributed_type": accelerator.distributed_type.value,
            "held": held,
            "losses": losses,
            "norms": norms,
            "shapes": {name: list(tensor.shape) for name, tensor in weights.items()},
            "weights": {name: tensor.tolist() for name, tensor in weights.items()},
        }
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def local_part(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 192 points of four kinds."""
    inputs = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(dim=1)), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--plugin", action="store_true", help="say here how to shard, instead of in the environment")
    parser.add_argument("--state_dict_type", default="SHARDED_STATE_DICT")
    parser.add_argument("--resume_from_checkpoint", help="the folder of a saved state")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses, norms and weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
