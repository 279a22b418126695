"""DeepSpeed's ZeRO from a JSON file: values of "auto" are filled from the arguments.

    DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19'
    trainer-lib launch --cpu --num_processes 2 examples/large_models/deepspeed_zero.py
    trainer-lib launch --cpu --num_processes 2 examples/large_models/deepspeed_zero.py --stage 3

A network reads handwritten digits with sharded optimizer states (stage 1), gradients (2) or weights (3). All stages
print the same losses.
"""

import argparse
import json
from pathlib import Path
from uuid import uuid4

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        TrainingArguments(
            output_dir=options.output_dir,
            deepspeed=write_config(Path(options.output_dir), options.stage),
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=8,
            global_batch_size=32,
            learning_rate=3e-3,
            progress_bar=False,
        ),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
    )
    result = trainer.fit()
    trainer.accelerator.print(f"\n{result}")
    trainer.accelerator.end_training()


def write_config(folder: Path, stage: int) -> str:
    """Write a configuration as DeepSpeed's users have it, and return its path."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file, draft = folder / f"zero_{stage}.json", folder / f"zero_{stage}-{uuid4().hex}.json"
    draft.write_text(json.dumps(config, indent=2), encoding="utf-8")
    draft.replace(file)  # at once, as another rank may be reading it
    return str(file)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train with DeepSpeed's ZeRO.")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
