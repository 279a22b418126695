"""Train with gradient accumulation, clipping and evaluation."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, set_seed

Loader = DataLoader[tuple[Tensor, ...]]


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(arguments.seed)
    training, validation = make_loaders(arguments.batch_size)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)

    losses: list[float] = []
    norms: list[float] = []
    accuracies: list[float] = []
    for epoch in range(arguments.epochs):
        model.train()
        for patterns, labels in training:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(patterns), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm=0.3)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        accuracies.append(evaluate(accelerator, model, validation))
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, accuracy {accuracies[-1]:.2%}")

    if accelerator.is_main_process:
        figures = {"losses": losses, "norms": norms, "accuracies": accuracies}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Loader) -> float:
    """Return the share of patterns that are told right."""
    model.eval()
    right = count = 0
    for patterns, labels in loader:
        predictions = model(patterns).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += (predictions == labels).sum().item()
        count += labels.shape[0]
    return right / count


def make_loaders(batch_size: int) -> tuple[Loader, Loader]:
    """Return 1,408 noisy patterns of ten kinds to train on, and 389 to validate with."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=generator)
    patterns = torch.randn(10, 64, generator=generator)[labels] + 2 * torch.randn(1797, 64, generator=generator)
    training = TensorDataset(patterns[:1408], labels[:1408])
    validation = TensorDataset(patterns[1408:], labels[1408:])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(validation, batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64, help="of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses, norms and accuracies")
    return parser.parse_args()


if __name__ == "__main__":
    main()
