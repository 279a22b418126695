"""This file is what a callback is handed: the run, as it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.events.requests import Control
from trainer_lib.events.run_state import RunState
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import sets_of_metric
from trainer_lib.modules.names import canonical_name

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator
    from trainer_lib.optimizer import AcceleratedOptimizer
    from trainer_lib.scheduler import AcceleratedScheduler


@dataclass
class Run:
    """The run, as it stands at an event.

    Attributes:
        trainer: The trainer; a callback that is tested without one leaves it out.
        args: The trainer's arguments.
        state: What the run has done so far.
        control: What callbacks ask for.
        folder: The run's folder, on this machine; `None` where nothing is written.
        accelerator: The engine.
        model: The prepared model, or the prepared models by name.
        optimizers: The prepared optimizers by name; a single one is called "default".
        schedulers: The prepared schedules by name.
        batch: The batch in hand, on its device, without repeated samples.
        outputs: What the model made of it; `None` where the step did not tell.
        loss_sum: The sum of its losses, detached.
        weight: How many items that is a sum over.
        grad_norm: The norm of the gradients before clipping; `None` where it is not computed.
        metrics: Those of the last evaluation.
        weighs_nothing: Whether the batch in hand only takes part in the update of other ranks, with weight 0.
        eval_sets: While an evaluation runs, the evaluation sets by name, and whether it takes each of them.
    """

    trainer: Any = None
    args: Any = None
    state: RunState = field(default_factory=RunState)
    control: Control = field(default_factory=Control)
    accelerator: "Accelerator" = None  # type: ignore[assignment]  # there is one in every event of a trainer
    model: nn.Module | Mapping[str, nn.Module] = None  # type: ignore[assignment]
    optimizers: dict[str, "AcceleratedOptimizer"] = field(default_factory=dict[str, "AcceleratedOptimizer"])
    schedulers: dict[str, "AcceleratedScheduler"] = field(default_factory=dict[str, "AcceleratedScheduler"])
    batch: Any = None
    outputs: Any = None
    loss_sum: Tensor | None = None
    weight: float | Tensor = 0.0
    grad_norm: Tensor | None = None
    weighs_nothing: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    eval_sets: Mapping[str, bool] = field(default_factory=dict[str, bool])
    folder: Path | None = None

    @property
    def loss(self) -> Tensor | None:
        """The loss of the batch in hand: the mean over its items, detached; 0 where nothing of it counts."""
        if self.loss_sum is None:
            return None
        if isinstance(self.weight, Tensor):
            return self.loss_sum / torch.where(self.weight == 0, 1, self.weight)
        return self.loss_sum / (self.weight or 1)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The user's models by name, without what distributes or compiles them; a single one is called ""."""
        named = {"": self.model} if isinstance(self.model, nn.Module) else dict(self.model)
        if self.accelerator is None:  # a callback that is tried without a trainer
            return named
        return {name: self.accelerator.strategy.bare(model) for name, model in named.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the names that their author knows; of several models, with the model's name before."""
        return {
            canonical_name(f"{model}.{name}" if model else name): parameter
            for model, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    @property
    def optimizer(self) -> "AcceleratedOptimizer":
        """The optimizer, where there is one."""
        return _only("optimizer", self.optimizers)

    @property
    def scheduler(self) -> "AcceleratedScheduler | None":
        """The schedule, where there is at most one."""
        return _only("scheduler", self.schedulers) if self.schedulers else None

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.accelerator is None or self.accelerator.is_main_process

    def leaves_out(self, metric: str) -> bool:
        """Whether the evaluation under way leaves out a set that a metric is computed on, so that it has no value."""
        return not all(self.eval_sets[name] for name in sets_of_metric(metric, self.eval_sets))

    def log(self, name: str, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Add a value to what is averaged until the next log, as `Trainer.log` does."""
        self.trainer.log(name, value, weight)

    def record_event(self, name: str, **facts: Any) -> None:
        """Tell what happened to those who keep the run's history, by `on_event`: a line there, a mark in the report.

        Args:
            name: What it is called, such as "skipped" or "rewound".
            **facts: What else there is to say: numbers, texts, lists and mappings of them.
        """
        if self.trainer is not None:
            self.trainer.events.fire("on_event", self, name, facts)


def _only(kind: str, named: Mapping[str, Any]) -> Any:
    if len(named) != 1:
        raise ConfigurationError(
            f"This run has {len(named)} {kind}s ({', '.join(named) or 'none'}): name one, as run.{kind}s[name]."
        )
    return next(iter(named.values()))
