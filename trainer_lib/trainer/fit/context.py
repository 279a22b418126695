"""What the parts of a fit share; each part owns its own state besides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.events import Dispatcher, Run
from trainer_lib.process_group import ProcessGroup
from trainer_lib.runs import RunFolder
from trainer_lib.trainer.fit.running_means import RunningMeans


@dataclass(frozen=True)
class FitContext:
    """What the parts of a fit share.

    Attributes:
        run: The run, as callbacks see it.
        accelerator: The engine.
        events: The dispatcher of events.
        loader: The prepared loader of training data.
        named_models: The prepared models by name; a single one is called "".
        means: The means that the next log takes.
        folder: The run's folder; `None`: nothing is written.
        has_own_step: Whether the user overrides `training_step`.
        in_sandbox: Whether a tool, such as the learning-rate finder, trains.
    """

    run: Run
    accelerator: Accelerator
    events: Dispatcher
    loader: Any
    named_models: Mapping[str, nn.Module]
    means: RunningMeans
    folder: RunFolder | None
    has_own_step: bool = False
    in_sandbox: bool = False

    @property
    def models(self) -> Sequence[nn.Module]:
        """The prepared models."""
        return list(self.named_models.values())

    @property
    def group(self) -> ProcessGroup:
        """All ranks."""
        return self.accelerator.group
