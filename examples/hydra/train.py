"""Hydra composes the configuration, and the Trainer takes it: any argument can be set on the command line.

    pip install '.[sklearn]' hydra-core
    python examples/hydra/train.py
    python examples/hydra/train.py optimizer=sgd training.num_train_epochs=5 model.width=128
    python examples/hydra/train.py --multirun training.learning_rate=1e-3,1e-2
    trainer-lib launch --cpu --num_processes 2 examples/hydra/train.py
    trainer-lib report runs/hydra

`conf/config.yaml` has the sections. `training` goes into `TrainingArguments` as it is, so a misspelt name is an error
that suggests the right one.
"""

from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    settings: Any = OmegaConf.to_container(config, resolve=True)
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(settings["training"]["seed"])
    trainer = Trainer(
        make_model(**settings["model"]),
        TrainingArguments(**settings["training"], **settings["optimizer"]),
        train_dataset=(images[:1200], digits[:1200]),
        eval_dataset=(images[1200:], digits[1200:]),
        loss_fn=cross_entropy,
        metrics=["accuracy"],
    )
    result = trainer.fit()
    trainer.accelerator.print(f"\n{OmegaConf.to_yaml(config)}\n{result}")
    trainer.accelerator.end_training()


def make_model(width: int, depth: int, dropout: float) -> nn.Module:
    """Return a network of `depth` hidden layers."""
    layers: list[nn.Module] = []
    for inputs in [64, *[width] * (depth - 1)]:
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


if __name__ == "__main__":
    main()
