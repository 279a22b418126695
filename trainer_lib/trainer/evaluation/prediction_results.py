"""Predictions for a whole set: the result objects, and the collectors of rows."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.public_names.signatures import parameter_names
from trainer_lib.foundation.tensors.pytree import map_leaves
from trainer_lib.trainer.data.batch_rows import count_output_rows
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric, as_numbers
from trainer_lib.trainer.evaluation.prediction_files import PredictionFiles, read_predictions
from trainer_lib.trainer.evaluation.row_buffers import PADDING, RowBuffers


@frozen_dataclass(eq=False)
class Predictions:
    """A model's predictions for a set, in the order of the set.

    It unpacks into predictions, labels and metrics.

    Attributes:
        predictions: Arrays with one row per sample, lists, or structures of these, as the step returned them; rows of
            different sizes are padded with -100.
        labels: The labels in the same form; `None` if there are none.
        metrics: The metrics of the predictions.
        folder: The folder of predictions on disk; `None` for predictions in memory.
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


def load_predictions(folder: str | Path) -> Predictions:
    """Return the predictions that `Trainer.predict(dataset, to=folder)` wrote. Arrays are memory-mapped.

    Raises:
        CheckpointError: If there are none, or they are incomplete.
    """
    predictions, labels, metrics = read_predictions(Path(folder))
    return Predictions(predictions, labels, metrics, Path(folder))


@frozen_dataclass(eq=False)
class EvaluationPrediction:
    """The argument of `compute_metrics`: predictions and labels of all samples, in the order of the set.

    It unpacks into these two.

    Attributes:
        predictions: See `Predictions`.
        label_ids: The labels, in the same form.
        inputs: Always `None`: inputs are not collected.
        losses: Always `None`: losses are summed, not collected.
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
    """Collects all rows, on every rank or only on the main process."""

    needs_all_rows = True

    def begin(self, device: torch.device) -> None:
        """Reset the collector."""
        self._predictions, self._labels = RowBuffers("predictions"), RowBuffers("labels")
        self._padding = PADDING

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        self._padding = output.padding
        total = count_output_rows(output.predictions, output.labels)
        self._predictions.add(output.predictions, total)
        self._labels.add(output.labels, total)

    def result(self, states: Sequence[Any]) -> tuple[Any, Any]:
        """Return predictions and labels."""
        return self._predictions.joined(self._padding, self.order), self._labels.joined(order=self.order)


class ComputedMetrics(Collector):
    """Metrics that a function computes from all predictions and labels at once.

    Only the main process collects rows and calls the function; its result is sent to the other ranks.

    Args:
        function: Takes an `EvaluationPrediction` (or predictions and labels), and returns numbers by name. One with a
            parameter `compute_result` gets tensors, and True for it.
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
        """Reset the collector."""
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
        return computed(self._function, *Collector.result(self, ()))


def computed(function: Callable[..., Any], predictions: Any, labels: Any) -> dict[str, float]:
    """Return the numbers by name that `compute_metrics` computes from all predictions and labels.

    Raises:
        ConfigurationError: If it returns something else.
    """
    try:
        values = _called(function, predictions, labels)
    except Exception as error:
        from trainer_lib.trainer.safety.error_context import described

        error.add_note(
            f"In compute_metrics, with predictions {described(predictions)} and labels {described(labels)}, as NumPy "
            "arrays."
        )
        raise
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f'compute_metrics returned a {type(values).__name__}. Return numbers by name, such as {{"accuracy": 0.9}}.'
        )
    return as_numbers("", values)


def _called(function: Callable[..., Any], predictions: Any, labels: Any) -> Any:
    if "compute_result" in parameter_names(function):  # it adds up tensors of batches: all rows are one batch
        rows = EvaluationPrediction(*map_leaves(_as_tensor, (predictions, labels)))
        return function(rows, compute_result=True)
    if _required(function) == 2:
        return function(predictions, labels)
    return function(EvaluationPrediction(predictions, labels))


class Writer(Metric):
    """Writes all rows to disk batch by batch, on the main process.

    Args:
        folder: The folder to write to.
    """

    needs_all_rows = True
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__("predictions")
        self._folder = folder
        self._error = HeldError(f"Writing predictions to {folder}", DistributedOperationException)

    def begin(self, device: torch.device) -> None:
        """Reset the collector."""
        self._files = PredictionFiles(self._folder)

    def update(self, output: EvaluationOutput) -> None:
        """Write a batch."""
        with self._error.held():
            self._files.add(output.predictions, output.labels, output.padding)

    def state(self) -> Any:
        """Return whether it worked so far."""
        return self._error.pack(None)

    def result(self, states: Sequence[Any]) -> Any:
        """Raise, on all processes, what went wrong on the main one."""
        return self._error.unpack(states[0])

    def commit(self, metrics: dict[str, float]) -> None:
        """Commit the folder, on the main process."""
        self._files.commit(metrics, self.order)

    def abandon(self) -> None:
        """Remove what was written."""
        self._files.abandon()


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if hasattr(value, "__array_interface__") else value


def _required(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function requires."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in by_place and parameter.default is parameter.empty for parameter in parameters)
