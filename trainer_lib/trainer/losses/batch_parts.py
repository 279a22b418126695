"""What a rank computes of each batch: all of it, or its part of the sequences (`sequence_parts.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainer_lib.strategies.base import Surroundings, no_surroundings
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.trainer_interface import TrainerInterface

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
        trainer: The trainer, whose step it is.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self.training_step: TrainingStep = trainer.training_step

    def of_window(self, model: Any, batches: Sequence[Any]) -> tuple[Sequence[Any], Surroundings]:
        """Return the batches."""
        del model
        return batches, no_surroundings


def batch_parts(trainer: TrainerInterface) -> BatchParts:
    """Return what a rank computes of the batches of a trainer.

    Raises:
        UnsupportedError: If ranks share sequences, and something else that is asked for needs whole ones.
    """
    if trainer.accelerator.sequence_split.ranks is None:
        return WholeBatches(trainer)
    from trainer_lib.trainer.losses.sequence_parts import sequence_parts

    return sequence_parts(trainer)
