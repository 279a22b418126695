"""This file is predictions over a set: what they are handed out as, and who collects them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric, as_numbers
from trainer_lib.trainer.evaluation.prediction_files import PredictionFiles, read_predictions
from trainer_lib.trainer.evaluation.row_buffers import RowBuffers


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for a set, in the order of the set.

    It unpacks into predictions, labels and metrics.

    Attributes:
        predictions: Arrays with one row a sample, lists, or structures of these, as the step returned them; rows of
            different sizes are padded with -100.
        labels: The same for labels; `None` if there are none.
        metrics: What was measured on the way.
        folder: Where they are on disk, if they are.
    """

    predictions: Any
    labels: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    folder: Path | None = None

    @property
    def label_ids(self) -> Any:
        """The labels, under Hugging Face's name."""
        return self.labels

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.labels, self.metrics))

    @classmethod
    def load(cls, folder: str | Path) -> "Predictions":
        """Return what `predict` wrote into a folder. Arrays stay on disk, and come as they are read.

        Raises:
            CheckpointError: If there are none, or they are not whole.
        """
        predictions, labels, metrics = read_predictions(Path(folder))
        return cls(predictions, labels, metrics, Path(folder))


@dataclass(frozen=True)
class EvaluationPrediction:
    """What `compute_metrics` is given: arrays of all samples, in the order of the set. It unpacks into two.

    Attributes:
        predictions: See `Predictions`.
        label_ids: The labels, the same way.
        inputs: Nothing: inputs are not collected.
        losses: Nothing: losses are summed, not collected.
    """

    predictions: Any
    label_ids: Any = None
    inputs: None = None
    losses: None = None

    @property
    def labels(self) -> Any:
        """The labels."""
        return self.label_ids

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, index: int) -> Any:
        return (self.predictions, self.label_ids)[index]


class Collector(Metric):
    """Collects all rows, on every process or on the main one."""

    needs_all_rows = True

    def begin(self, device: torch.device) -> None:
        """Start over."""
        self._predictions, self._labels = RowBuffers("predictions"), RowBuffers("labels")

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        self._predictions.add(output.predictions)
        self._labels.add(output.labels)

    def result(self, states: Sequence[Any]) -> tuple[Any, Any]:
        """Return predictions and labels."""
        return self._predictions.joined(), self._labels.joined()


class ComputedMetrics(Collector):
    """What a function makes of all predictions and labels at once.

    Only the main process collects them and calls it; what it returns is told to the others.

    Args:
        function: Takes an `EvaluationPrediction` (or predictions and labels), and returns numbers by name.
    """

    main_process_only = True

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__("")
        if not callable(function):
            raise ConfigurationError(
                f"compute_metrics must be a function of predictions and labels, got a {type(function).__name__}."
            )
        self._function = function
        self._error = HeldError("compute_metrics", DistributedOperationException)

    def begin(self, device: torch.device) -> None:
        """Start over."""
        super().begin(device)
        self._error = HeldError("compute_metrics", DistributedOperationException)

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        with self._error.held():
            super().update(output)

    def state(self) -> Any:
        """Return what came out."""
        values: dict[str, float] = {}
        with self._error.held():
            values = self._computed()
        return self._error.pack(values)

    def result(self, states: Sequence[Any]) -> Any:
        """Return what came out on the main process."""
        return self._error.unpack(states[0])

    def _computed(self) -> dict[str, float]:
        return computed(self._function, self._predictions.joined(), self._labels.joined())


def computed(function: Callable[..., Any], predictions: Any, labels: Any) -> dict[str, float]:
    """Return what `compute_metrics` makes of all predictions and labels: numbers by name.

    Raises:
        ConfigurationError: If it returns something else.
    """
    takes_two = _required(function) == 2
    values = function(predictions, labels) if takes_two else function(EvaluationPrediction(predictions, labels))
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f'compute_metrics returned a {type(values).__name__}. Return numbers by name, such as {{"accuracy": 0.9}}.'
        )
    return as_numbers("", values)


class Writer(Metric):
    """Writes all rows to disk as they come; the main process does.

    Args:
        folder: Where to.
    """

    needs_all_rows = True
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__("predictions")
        self._folder = folder
        self._error = HeldError(f"Writing predictions to {folder}", DistributedOperationException)

    def begin(self, device: torch.device) -> None:
        """Start over."""
        self._files = PredictionFiles(self._folder)

    def update(self, output: EvaluationOutput) -> None:
        """Write a batch."""
        with self._error.held():
            self._files.add(output.predictions, output.labels)

    def state(self) -> Any:
        """Return whether it worked so far."""
        return self._error.pack(None)

    def result(self, states: Sequence[Any]) -> Any:
        """Raise, on all processes, what went wrong on the main one."""
        return self._error.unpack(states[0])

    def commit(self, metrics: dict[str, float]) -> None:
        """Put the folder in its place; the main process does."""
        self._files.commit(metrics)

    def abandon(self) -> None:
        """Remove what was written."""
        self._files.abandon()


def _required(function: Callable[..., Any]) -> int:
    """Return how many arguments by place a function has to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in by_place and parameter.default is parameter.empty for parameter in parameters)
