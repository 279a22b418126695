"""Outputs of an evaluation step, and the interface of metrics."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX

if TYPE_CHECKING:
    from trainer_lib.data_loader.order.permutation import Positions


@dataclass(frozen=True, eq=False)
class EvaluationOutput:
    """The output of an evaluation step for one batch.

    Attributes:
        loss_sum: The sum of the losses of `weight` items; `None` if there is no loss.
        weight: The number of items: valid tokens, samples, pixels.
        predictions: One row per sample, in the leading dimension of tensors or in lists; structures of these.
        labels: In the same form as predictions; `None` if there are none.
        padding: What the rows of `predictions` are padded with, where batches have rows of different sizes.
        ignored_label: The label that built-in metrics leave out.
        logged: Sums and weights by name of what the step logged, which become metrics. The trainer fills it in.
        shifted_labels: The labels, if the model's loss compares each prediction with the label of the next position,
            as in causal language models. Built-in metrics do so too, unless `labels` was replaced.
    """

    loss_sum: Tensor | None = None
    weight: float | Tensor = 0.0
    predictions: Any = None
    labels: Any = None
    padding: int = IGNORE_INDEX
    ignored_label: int = IGNORE_INDEX
    logged: Mapping[str, tuple[float | Tensor, float | Tensor]] | None = None
    shifted_labels: Any = None


class Metric(ABC):
    """A metric that is updated batch by batch on each rank, and reduced across ranks at the end.

    Args:
        name: Its name, without a prefix.
    """

    # Whether the metric gets the batches of all ranks, in the order of the dataset.
    needs_all_rows: bool = False
    # Whether only the main process updates such a metric, and sends the result to the other ranks.
    main_process_only: bool = False

    # The samples in the order in which they are read; None: in the order of the data.
    order: "Positions | None" = None

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def begin(self, device: torch.device) -> None:
        """Reset the metric."""

    @abstractmethod
    def update(self, output: EvaluationOutput) -> None:
        """Add the step's output for a batch of this rank, or of any rank if the metric needs all rows."""

    def select(self, output: EvaluationOutput) -> EvaluationOutput:
        """Return the parts of an output that are gathered."""
        return EvaluationOutput(predictions=output.predictions, labels=output.labels, padding=output.padding)

    def state(self) -> Any:
        """Return this rank's state, which the other ranks need for the result."""
        return None

    @abstractmethod
    def result(self, states: Sequence[Any]) -> Any:
        """Return the value: a number, or numbers by name.

        Args:
            states: The states of the ranks that had batches, in order of rank.
        """


def as_numbers(name: str, value: Any) -> dict[str, float]:
    """Return the value of a metric by full names: its name, or `name_key` for each number of several.

    Raises:
        ConfigurationError: If the value is neither a number nor numbers by name.

    Example:
        >>> as_numbers("f1", {"macro": 0.5, "micro": torch.tensor(0.75)})
        {'f1_macro': 0.5, 'f1_micro': 0.75}
    """
    if isinstance(value, Mapping):
        numbers: dict[str, float] = {}
        for key, part in value.items():
            # {"accuracy": …} from a metric named accuracy keeps that name.
            whole = name if key == name else f"{name}_{key}" if name else str(key)
            numbers |= as_numbers(whole, part)
        return numbers
    return {name: _number(name, value)}


def _number(name: str, value: Any) -> float:
    try:
        # float() alone would accept a string.
        return float(value.item() if hasattr(value, "item") else value + 0)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" ({shown(value)})"
        raise ConfigurationError(
            f"The metric {name!r} returned a {type(value).__name__}{shape}. A metric must be one number, or a dict of "
            "numbers: average it, or give its parts names."
        ) from None
