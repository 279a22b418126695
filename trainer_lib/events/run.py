"""The run that each callback gets: its state, models, optimizers, batch and loss."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.events.requests import Control
from trainer_lib.events.run_state import RunState
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import sets_of_metric
from trainer_lib.modules.weights.names import canonical_name

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator
    from trainer_lib.optimizer import AcceleratedOptimizer
    from trainer_lib.scheduler import AcceleratedScheduler


@dataclass(eq=False)
class Run:
    """The state of a run at an event.

    Attributes:
        trainer: The trainer; `None` where a callback is tested without one.
        args: The trainer's arguments.
        state: The progress of the run.
        control: The requests of callbacks.
        folder: The run's folder, on this machine; `None` where nothing is written.
        accelerator: The accelerator.
        model: The prepared model, or the prepared models by name.
        optimizers: The prepared optimizers by name; a single one is called "default".
        schedulers: The prepared schedules by name.
        batch: The current batch, on its device, without repeated samples.
        outputs: The model's outputs for the batch; `None` where the training step does not return them.
        loss_sum: The sum of the batch's losses, detached.
        weight: The number of items in that sum.
        grad_norm: The norm of the gradients before clipping; `None` where it is not computed.
        metrics: The metrics of the last evaluation.
        weighs_nothing: Whether the current batch has weight 0 and only takes part in the update of other ranks.
        saving_seconds: The time that training waited for checkpoints, without that of writing in the background.
        averaged_weights: Returns the context in which the weights are their mean over the ranks; it does nothing unless
            ranks train copies that differ (`local_sgd_steps`).
        eval_sets: While an evaluation runs: for each evaluation set, by name, whether it is evaluated.
        eval_loader: The prepared loader that evaluations and predictions read last; `None` before the first.
    """

    trainer: Any = None
    args: Any = None
    state: RunState = field(default_factory=RunState)
    control: Control = field(default_factory=Control)
    accelerator: "Accelerator" = None  # type: ignore[assignment]  # a trainer's events always have one
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
    eval_loader: Any = None
    folder: Path | None = None
    saving_seconds: float = 0.0
    averaged_weights: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def loss(self) -> Tensor | None:
        """The loss of the current batch: the mean over its items, detached; 0 where no item counts."""
        if self.loss_sum is None:
            return None
        if isinstance(self.weight, Tensor):
            return self.loss_sum / torch.where(self.weight == 0, 1, self.weight)
        return self.loss_sum / (self.weight or 1)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The user's models by name, without distributed or compiled wrappers; a single one is called ""."""
        named = {"": self.model} if isinstance(self.model, nn.Module) else dict(self.model)
        if self.accelerator is None:  # a callback that is tested without a trainer
            return named
        return {name: self.accelerator.strategy.bare(model) for name, model in named.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the names they have in the user's model; with several models, after the model's name."""
        return {
            canonical_name(f"{model}.{name}" if model else name): parameter
            for model, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    @property
    def is_shifted(self) -> bool:
        """Whether the model compares each position with the label of the next; known after the first batch."""
        shift = getattr(self.trainer, "label_shift", None)
        return shift is not None and shift.answer

    @property
    def trained_parameters(self) -> list[Tensor]:
        """The parameters of all optimizers."""
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def optimizer(self) -> "AcceleratedOptimizer":
        """The optimizer, if the run has exactly one."""
        return _only("optimizer", self.optimizers)

    @property
    def scheduler(self) -> "AcceleratedScheduler | None":
        """The schedule, if the run has one; `None` if it has none."""
        return _only("scheduler", self.schedulers) if self.schedulers else None

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, which prints and writes."""
        return self.accelerator is None or self.accelerator.is_main_process

    def leaves_out(self, metric: str) -> bool:
        """Whether the evaluation under way skips a set that the metric is computed on, so that it has no value."""
        return not all(self.eval_sets[name] for name in sets_of_metric(metric, self.eval_sets))

    def log(self, name: str, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        """Add a value to the mean that the next log shows, as `Trainer.log` does."""
        self.trainer.log(name, value, weight)

    def record_event(self, name: str, **facts: Any) -> None:
        """Fire `on_event`: the history gets a line, and the report a mark.

        Args:
            name: The name of the event, such as "skipped" or "rewound".
            **facts: Details: numbers, texts, and lists and mappings of them. `step` is the step that the event belongs
                to, if that is not the last one: during an update it is the next.
        """
        if self.trainer is not None:
            self.trainer.events.fire("on_event", self, name, facts)


def _only(kind: str, named: Mapping[str, Any]) -> Any:
    if len(named) != 1:
        raise ConfigurationError(
            f"run.{kind} needs exactly one {kind}, and this run has {len(named)} ({', '.join(named) or 'none'}). "
            f"Use run.{kind}s[name]."
        )
    return next(iter(named.values()))
