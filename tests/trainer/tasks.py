"""A small task for tests of the trainer: points on two sides of a line."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.events import Callback, Run
from trainer_lib.events.callback import EVENTS

Points = tuple[Tensor, Tensor]


def points(count: int = 40) -> Points:
    """Return points and their sides."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    return inputs, (inputs.sum(dim=1) > 0).long()


def network(dropout: float = 0.0) -> nn.Module:
    """Return a network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def arguments(**options: Any) -> TrainingArguments:
    """Return arguments for a short run that shows no bar."""
    quiet: dict[str, Any] = {"num_train_epochs": 2, "learning_rate": 0.05, "use_cpu": True, "progress_bar": False}
    limits = {"max_steps", "max_time"} & options.keys()
    if limits and "num_train_epochs" not in options:
        del quiet["num_train_epochs"]
    return TrainingArguments(**{**quiet, **options})


def trainer(args: TrainingArguments | None = None, **options: Any) -> Trainer:
    """Return a trainer for the task; 5 steps of 8 points a pass."""
    defaults: dict[str, Any] = {"train_dataset": points(), "loss_fn": cross_entropy}
    model = options.pop("model", None) or network()
    return Trainer(model, args or arguments(), **{**defaults, **options})


class Recorder(Callback):
    """Keeps which events there were, with the step at which they were."""

    def __init__(self, *wanted: str) -> None:
        self.events: list[str] = []
        for name in wanted or EVENTS:
            setattr(self, name, self._keeper(name))

    def _keeper(self, name: str) -> Any:
        def keep(run: Run, *details: Any) -> None:
            del details
            self.events.append(f"{name.removeprefix('on_')} {run.state.step}")

        return keep
