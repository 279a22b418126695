"""What the parts of a fit share; each part owns its own state besides."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.events import Dispatcher, Run
from trainer_lib.events.callback import UpdatePlan
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.process_group import ProcessGroup
from trainer_lib.runs import RunFolder
from trainer_lib.trainer.evaluation.evaluation_plan import EvaluationPlan
from trainer_lib.trainer.losses.batch_loss import BatchLoss
from trainer_lib.trainer.metrics.running_means import RunningMeans


@frozen_dataclass(eq=False)
class FitContext:
    """What the parts of a fit share.

    Attributes:
        run: The run, as callbacks see it.
        accelerator: The engine.
        events: The dispatcher of events.
        loader: The prepared loader of training data.
        named_models: The prepared models by name; a single one is called "".
        means: The means that the next log takes.
        loss: The loss of a batch.
        evaluation: What is evaluated.
        folder: The run's folder; `None`: nothing is written.
        update_plan: The number of batches per update, by epoch; `None`: the same in all epochs.
        schedule_length: The steps that schedules are made for; `None`: not known.
        in_sandbox: Whether a tool, such as the learning-rate finder, trains.
    """

    run: Run
    accelerator: Accelerator
    events: Dispatcher
    loader: Any
    named_models: Mapping[str, nn.Module]
    means: RunningMeans
    loss: BatchLoss
    evaluation: EvaluationPlan
    folder: RunFolder | None
    update_plan: UpdatePlan | None
    schedule_length: int | None
    in_sandbox: bool

    @property
    def models(self) -> Sequence[nn.Module]:
        """The prepared models."""
        return list(self.named_models.values())

    def updates_in(self, epochs: float) -> int | None:
        """Return the number of updates in the first `epochs` epochs; `None` if the length of the data is not known."""
        batches, per_epoch = length_of(self.loader), self.run.state.steps_per_epoch
        if self.update_plan is not None and batches is not None:
            return self.update_plan.updates(batches, epochs)
        return None if per_epoch is None else math.ceil(epochs * per_epoch - 1e-9)

    def recount_steps(self) -> None:
        """Set the number of updates after which the run ends to those so far and those of the epochs that are left."""
        state, limit = self.run.state, self.run.args.max_steps
        if state.steps_per_epoch is None or state.max_epochs is None:
            return
        behind = (self.updates_in(state.epoch) or 0) + state.steps_in_epoch
        steps = state.step + (self.updates_in(state.max_epochs) or 0) - behind
        state.max_steps = steps if limit is None else min(steps, limit)

    @property
    def has_own_step(self) -> bool:
        """Whether the user overrides `training_step`."""
        return self.loss.has_own_step

    @property
    def group(self) -> ProcessGroup:
        """All ranks."""
        return self.accelerator.group
