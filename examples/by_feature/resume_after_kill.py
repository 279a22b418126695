"""Resuming after a kill: a run that SIGKILL ended resumes from its last checkpoint, and ends with the same bits.

    python examples/by_feature/resume_after_kill.py

The script starts itself three times: once undisturbed; once killed in the middle; and once more with the command of the
killed run. It compares the weights of both runs.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Callback, Run, Trainer, TrainingArguments


class Kill(Callback):
    """Ends the process as the system does when its memory runs out: at once, with no time to save."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run: Run) -> None:
        """Kill the process."""
        if run.state.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, killed_at: int) -> None:
    """Train, and save the weights."""
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
        TrainingArguments(
            output_dir=folder,
            max_steps=200,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            save_every="20 steps",
            resume="auto",  # the newest run in the folder, or a new one
            progress_bar=False,
        ),
        train_dataset=(images, digits),
        loss_fn=cross_entropy,
        callbacks=[Kill(killed_at)],
    )
    trainer.fit()
    trainer.save_model(folder / "model")
    trainer.accelerator.end_training()


def main() -> None:
    options = parse_options()
    if options.train is not None:
        train(Path(options.train), options.killed_at)
        return
    if "RANK" in os.environ:
        sys.exit("Start this script by python alone: it starts the processes that it kills.")
    root = Path(options.output_dir) / "kill"
    whole = start(root / "undisturbed", 0)
    killed = start(root / "killed", 115)
    print("\nThe same command once more.\n", flush=True)
    resumed = start(root / "killed", 0)
    weights, again = (load_file(root / name / "model" / "model.safetensors") for name in ("undisturbed", "killed"))
    equal = all(torch.equal(weights[name], again[name]) for name in weights)
    print(f"\nexit codes: undisturbed {whole}, killed at step 115 {killed}, resumed {resumed}")
    print(f"The weights of both runs are {'equal to the last bit' if equal else 'DIFFERENT'}.")


def start(folder: Path, killed_at: int) -> int:
    """Run the training in a process of its own; return its exit code."""
    command = [sys.executable, __file__, "--train", str(folder), "--killed_at", str(killed_at)]
    return subprocess.run(command, check=False).returncode


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Kill a run, resume it, and compare.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--killed_at", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
