"""Evaluate on several ranks and count each sample once, whatever the size of the last batch."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from trainer_lib import Accelerator
from trainer_lib.utils import set_seed


class Points(Dataset[dict[str, Any]]):
    """Points in the plane, which side of a line they are on, and their names."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.points[:, 0] > 0.5 * self.points[:, 1]).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"points": self.points[index], "labels": self.labels[index], "names": f"point {index}"}


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    set_seed(arguments.seed)
    batch_size = arguments.batch_size // accelerator.num_processes
    training = DataLoader(Points(256, seed=1), batch_size)
    validation = DataLoader(Points(arguments.validation_size, seed=2), batch_size)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)

    for epoch in range(arguments.epochs):
        model.train()
        for batch in training:
            accelerator.backward(cross_entropy(model(batch["points"]), batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
        metrics = evaluate(accelerator, model, validation)
        accelerator.print(f"epoch {epoch}: accuracy {metrics['accuracy']:.2%} of {metrics['count']}")
        if accelerator.is_main_process:
            Path(arguments.figures).write_text(json.dumps(metrics))
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[dict[str, Any]]) -> dict[str, Any]:
    """Return accuracy, confusion matrix and loss over all processes, and the names of the points in their order."""
    model.eval()
    confusion = torch.zeros(2, 2, dtype=torch.long)
    names: list[str] = []
    losses: list[Tensor] = []
    for batch in loader:
        logits = model(batch["points"])
        loss = cross_entropy(logits, batch["labels"], reduction="none")
        gathered = accelerator.gather_for_metrics({"predictions": logits.argmax(-1), "labels": batch["labels"]})
        for label, prediction in zip(gathered["labels"].tolist(), gathered["predictions"].tolist(), strict=True):
            confusion[label, prediction] += 1
        losses.append(accelerator.gather_for_metrics(loss))
        names += accelerator.gather_for_metrics(batch["names"], use_gather_object=True)
    count = int(confusion.sum())
    return {
        "accuracy": int(confusion.trace()) / count,
        "confusion": confusion.tolist(),
        "count": count,
        "loss": torch.cat(losses).mean().item(),
        "names": names,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16, help="of all processes together")
    parser.add_argument("--validation_size", type=int, default=101)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write the metrics")
    return parser.parse_args()


if __name__ == "__main__":
    main()
