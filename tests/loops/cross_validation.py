"""Cross-validation: one model per fold, and their mean prediction on held-out images."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, set_seed


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    unseen = Subset(data, range(1500, len(data)))
    folds = StratifiedKFold(n_splits=arguments.num_folds).split(images[:1500], labels[:1500])

    opinions: list[Tensor] = []
    accuracies: list[float] = []
    truth = torch.empty(0)
    for training_rows, validation_rows in folds:
        set_seed(arguments.seed)
        model: Any = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=5e-3)
        training: Any = DataLoader(Subset(data, training_rows.tolist()), 40, shuffle=True, drop_last=True)
        validation: Any = DataLoader(Subset(data, validation_rows.tolist()), 40)
        test: Any = DataLoader(unseen, 40)
        model, optimizer, training, validation, test = accelerator.prepare(model, optimizer, training, validation, test)
        for _ in range(arguments.epochs):
            model.train()
            for batch, targets in training:
                accelerator.backward(cross_entropy(model(batch), targets))
                optimizer.step()
                optimizer.zero_grad()
        logits, targets = predict(accelerator, model, validation)
        accuracies.append((logits.argmax(-1) == targets).float().mean().item())
        logits, truth = predict(accelerator, model, test)
        opinions.append(logits)
        # The next fold starts from nothing.
        model, optimizer, training, validation, test = accelerator.free_memory(
            model, optimizer, training, validation, test
        )

    together = torch.stack(opinions).mean(dim=0).argmax(-1)
    if accelerator.is_main_process:
        figures = {
            "accuracies": accuracies,
            "test_accuracy": (together == truth).float().mean().item(),
            "tested": len(together),
            "first_logits": opinions[0][0].tolist(),
        }
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


@torch.no_grad()
def predict(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of all images of a loader."""
    model.eval()
    gathered = [accelerator.gather_for_metrics((model(images), labels)) for images, labels in loader]
    return torch.cat([logits for logits, _ in gathered]).cpu(), torch.cat([labels for _, labels in gathered]).cpu()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num_folds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write accuracies")
    return parser.parse_args()


if __name__ == "__main__":
    main()
