"""Profile a training: some batches by a schedule, then an epoch with one trace per rank."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, ProfileKwargs, set_seed


def main() -> None:
    arguments = parse_arguments()
    reports: list[dict[str, Any]] = []

    def report(profiler: torch.profiler.profile) -> None:
        averages = profiler.key_averages()
        (linear,) = (event for event in averages if event.key == "aten::addmm")
        reports.append(
            {
                "calls": linear.count,
                "flops": linear.flops,
                "has_memory": any(event.self_cpu_memory_usage for event in averages),
                "table": averages.table(sort_by="self_cpu_time_total", row_limit=100),
            }
        )

    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[
            ProfileKwargs(
                activities=["cpu"],
                schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1},
                on_trace_ready=report,
                profile_memory=True,
                with_flops=True,
            )
        ],
    )
    set_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(arguments.batch_size))

    def train_step(inputs: Tensor, labels: Tensor) -> float:
        loss = cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.gather(loss.detach()).mean().item()

    losses: list[float] = []
    with accelerator.profile() as profiler:
        for inputs, labels in loader:
            losses.append(train_step(inputs, labels))
            profiler.step()

    trace = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=arguments.output_dir)
    with accelerator.profile(trace) as profiler:
        for inputs, labels in loader:
            losses.append(train_step(inputs, labels))
    calls = sum(event.count for event in profiler.key_averages() if event.key == "aten::addmm")

    counts = accelerator.gather(torch.tensor([len(reports)], device=accelerator.device)).tolist()
    if accelerator.is_main_process:
        figures = {"losses": losses, "reports": reports, "reports_of_all": counts, "calls": calls}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return 320 points, of which one side is labelled."""
    inputs = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--output_dir", default=".", help="where to write the traces")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses and counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
