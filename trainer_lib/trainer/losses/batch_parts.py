"""What a rank computes of each batch: all of it, or its part of the sequences (`sequence_parts.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainer_lib.strategies.base import Surroundings, no_surroundings
from trainer_lib.trainer.losses.loss_result import LossResult

TrainingStep = Callable[[Any, Any], LossResult | None]


class BatchParts(Protocol):
    """What a rank computes of each batch."""

    @property
    def training_step(self) -> TrainingStep:
        """Computes the gradients of this rank's part of a batch."""
        ...

    def of_window(self, model: Any, batches: Sequence[Any]) -> tuple[Sequence[Any], Surroundings]:
        """Return this rank's parts of the micro-batches of a window, and the contexts to compute them in."""
        ...


class WholeBatches:
    """A rank computes whole batches.

    Args:
        training_step: The trainer's step.
    """

    def __init__(self, training_step: TrainingStep) -> None:
        self.training_step: TrainingStep = training_step

    def of_window(self, model: Any, batches: Sequence[Any]) -> tuple[Sequence[Any], Surroundings]:
        """Return the batches."""
        del model
        return batches, no_surroundings
