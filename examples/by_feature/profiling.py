"""Profiling: which operations a step spends its time on, and how long it waits for data.

    python examples/by_feature/profiling.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/profiling.py

It prints the slowest operations of five updates, and the path of a trace for https://ui.perfetto.dev or chrome://tracing.
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import Profile, Throughput


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(
            nn.Conv2d(1, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 10),
        ),
        TrainingArguments(
            output_dir=options.output_dir,
            max_steps=25,
            per_device_train_batch_size=64,
            log_every="5 steps",
            progress_bar=False,
        ),
        train_dataset=(images, digits),
        loss_fn=cross_entropy,
        callbacks=[Profile(after=10, steps=5, top=8), Throughput()],
    )
    result = trainer.fit()
    if trainer.accelerator.is_main_process:
        assert result.report is not None
        print_profile(Path(str(result.report)).parent)
    trainer.accelerator.end_training()


def print_profile(folder: Path) -> None:
    """Print what the callbacks wrote into a run's history."""
    entries = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [entry for entry in entries if "samples_per_second" in entry][-1]
    print(f"\n{last['samples_per_second']:.0f} samples a second, {last['data_wait']:.1%} of the time waiting for data")
    (profile,) = [entry for entry in entries if entry["event"] == "profile"]
    print("\nslowest operations of 5 updates")
    for operation in profile["operations"]:
        print(f"{operation['milliseconds']:10.2f} ms{operation['calls']:6} calls  {operation['name']}")
    for trace in sorted((folder / "profile").iterdir()):
        print(f"trace: {trace}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Profile five updates of a training.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
