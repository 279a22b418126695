"""This file is what an evaluation step makes of a batch, and what a metric makes of that."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError


@dataclass(frozen=True)
class EvaluationOutput:
    """What an evaluation step made of a batch.

    Attributes:
        loss_sum: The sum of the losses of so many items as `weight` says; `None` if there is no loss.
        weight: How many items: valid tokens, samples, pixels.
        predictions: One row a sample, in the leading dimension of tensors or in lists; structures of these.
        labels: As predictions; `None` if there are none.
    """

    loss_sum: Tensor | None = None
    weight: float | Tensor = 0.0
    predictions: Any = None
    labels: Any = None


class Metric(ABC):
    """A metric as the evaluation feeds it: batch by batch, on each process, put together at the end.

    Args:
        name: Its name, without a prefix.
    """

    # Whether batches are handed round, for those to take who need all of them, in the order of the dataset.
    needs_all_rows: bool = False
    # Whether, of these, only the main process takes them, and tells the others what came out.
    main_process_only: bool = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def begin(self, device: torch.device) -> None:
        """Start over."""

    @abstractmethod
    def update(self, output: EvaluationOutput) -> None:
        """Take in what the step made of a batch of this process (or, if handed round, of any)."""

    def select(self, output: EvaluationOutput) -> EvaluationOutput:
        """Return what of an output is handed round."""
        return EvaluationOutput(predictions=output.predictions, labels=output.labels)

    def state(self) -> Any:
        """Return what the other processes have to know of this one."""
        return None

    @abstractmethod
    def result(self, states: Sequence[Any]) -> Any:
        """Return the value: a number, or numbers by name.

        Args:
            states: What `state` returned, of each process that had batches, in order of rank.
        """


def as_numbers(name: str, value: Any) -> dict[str, float]:
    """Return the value of a metric by full names: its own, or `name_key` for each of several.

    Raises:
        ConfigurationError: If it is neither a number nor numbers by name.

    Example:
        >>> as_numbers("f1", {"macro": 0.5, "micro": torch.tensor(0.75)})
        {'f1_macro': 0.5, 'f1_micro': 0.75}
    """
    if isinstance(value, Mapping):
        numbers: dict[str, float] = {}
        for key, one in value.items():
            # {"accuracy": …} of a metric called accuracy is just that.
            whole = name if key == name else f"{name}_{key}" if name else str(key)
            numbers |= as_numbers(whole, one)
        return numbers
    return {name: _number(name, value)}


def _number(name: str, value: Any) -> float:
    try:
        # Not float() alone, which would read a text.
        return float(value.item() if hasattr(value, "item") else value + 0)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" ({shown(value)})"
        raise ConfigurationError(
            f"The metric {name!r} is a {type(value).__name__}{shape}, and a metric is one number, or a dict of "
            "numbers. Average it, or name its parts."
        ) from None
