"""This file is metrics kept as sums: exact on any number of processes, in memory that does not grow."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException, unknown
from trainer_lib.state.partial_state import PartialState
from trainer_lib.trainer.data.batch_rows import count_rows
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.classification import NAMES, classification_metric

Weight = float | Tensor
Measured = tuple[Tensor | float, Weight]
MeanState = tuple[float, float, bool, int, int]


class MeanMetric(Metric):
    """A mean over the items of all batches.

    Args:
        name: Its name.
        measure: Returns, for a batch, a sum and how many items it is a sum over; `None` where no batch has any.
        finish: What becomes of the mean.
    """

    def __init__(
        self,
        name: str,
        measure: Callable[[EvaluationOutput], Measured | None],
        finish: Callable[[float], float] = lambda mean: mean,
    ) -> None:
        super().__init__(name)
        self._measure, self._finish = measure, finish

    def begin(self, device: torch.device) -> None:
        """Start over."""
        self._sum, self._without = RunningSum(device), 0

    def measured(self, output: EvaluationOutput) -> dict[str, Measured]:
        """Return the sum and the weight of a batch by name; nothing if the batch has neither."""
        measured = self._measure(output)
        return {} if measured is None else {self.name: measured}

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        measured = self._measure(output)
        if measured is None:
            self._without += 1
        else:
            self._sum.add(*measured)

    def state(self) -> MeanState:
        """Return the sum, the weight, whether anything was added, and which batches had nothing."""
        return *self._sum.read(), self._without, PartialState().process_index

    def result(self, states: Sequence[MeanState]) -> Any:
        """Return the mean over all processes; by no name if nobody has anything.

        Raises:
            DistributedOperationException: If some batches have something, and some have not.
        """
        if not any(state[2] for state in states):
            return {}
        without = [f"{count} on process {rank}" for _, _, _, count, rank in states if count]
        if without:
            raise DistributedOperationException(
                f"Some batches have no {self.name}, and others have one: {', '.join(without)} have none. Do these lack "
                "the labels? Return batches of the same keys from the dataset and the collate function, on all "
                "processes."
            )
        total, weight = sum(state[0] for state in states), sum(state[1] for state in states)
        return self._finish(total / weight) if weight else math.nan


class FunctionMetric(Metric):
    """What a function of predictions and labels returns: a value a row, or one, taken as the mean over its rows.

    Args:
        name: Its name.
        function: The function; it may return several such values by name.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name)
        self._function = function

    def begin(self, device: torch.device) -> None:
        """Start over."""
        self._device = device
        self._sums: dict[str | None, RunningSum] = {}

    def measured(self, output: EvaluationOutput) -> dict[str, Measured]:
        """Return the sums and weights of a batch by name."""
        return {self.name if key is None else f"{self.name}_{key}": part for key, part in self._of(output).items()}

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        for key, part in self._of(output).items():
            if key not in self._sums:
                self._sums[key] = RunningSum(self._device)
            self._sums[key].add(*part)

    def _of(self, output: EvaluationOutput) -> dict[str | None, Measured]:
        value = self._function(output.predictions, output.labels)
        named: Mapping[str | None, Any] = value if isinstance(value, Mapping) else {None: value}
        rows = count_rows((output.labels, output.predictions))
        if rows is None:
            raise ConfigurationError(f"The metric {self.name!r} got predictions and labels that have no rows.")
        return {key: self._over_rows(key, part, rows) for key, part in named.items()}

    def state(self) -> dict[str | None, tuple[float, float, bool]]:
        """Return the sums and weights."""
        return {key: one.read() for key, one in self._sums.items()}

    def result(self, states: Sequence[dict[str | None, tuple[float, float, bool]]]) -> Any:
        """Return the means over all processes."""
        names = [list(state) for state in states]
        if any(set(other) != set(names[0]) for other in names):
            raise DistributedOperationException(
                f"The metric {self.name!r} has other names on some processes than on others: {names}. Return the same "
                "for each batch."
            )
        means = {
            key: sum(state[key][0] for state in states) / sum(state[key][1] for state in states)
            for key in (names[0] if names else [])
        }
        return means.get(None, means)

    def _over_rows(self, key: str | None, value: Any, rows: int) -> Measured:
        try:
            values = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            values = torch.empty(0, 0)
        if values.numel() == 1:
            return values.reshape(()).to(self._device).double() * rows, float(rows)
        if values.ndim == 1 and len(values) == rows:
            return values.to(self._device).sum(dtype=accurate(self._device)), float(rows)
        what = f"{self.name}[{key!r}]" if key is not None else self.name
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"The metric {what} returned a {type(value).__name__}{shape} for a batch of {rows} rows. Return one value "
            "a row, or one number, which counts as their mean; give what needs all rows at once as compute_metrics."
        )


class RunningSum:
    """A sum and its weight. Nothing is read from the device until `read`.

    Args:
        device: Where it is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=accurate(device), device=device)
        self._weight: Weight = 0.0
        self._seen = False

    def add(self, total: Tensor | float, weight: Weight) -> None:
        """Add a sum over so many items; over none, it counts for nothing, even if it is not a number."""
        self._seen = True
        if isinstance(weight, Tensor):
            weight = weight.detach().to(self._total)
            total = torch.where(weight > 0, total, 0.0)
        elif not weight:
            return
        self._total += total.detach() if isinstance(total, Tensor) else total
        self._weight = self._weight + weight

    def read(self) -> tuple[float, float, bool]:
        """Return the sum, the weight, and whether anything was added."""
        return float(self._total), float(self._weight), self._seen


def accurate(device: torch.device) -> torch.dtype:
    """Return the type to sum in: thousands of float32 values would lose digits, but some devices have nothing else."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean_loss() -> MeanMetric:
    """Return the loss, as a metric."""
    return MeanMetric("loss", _loss)


def named_metric(given: str, name: str) -> Metric:
    """Return the metric that is called `given`.

    Raises:
        ConfigurationError: If there is none.
    """
    if top := re.fullmatch(r"top_?([1-9]\d*)_accuracy", given):
        k = int(top[1])
        return MeanMetric(name, lambda output: _top_accuracy(given, output, k))
    if (metric := classification_metric(given, name, _tensors, chosen_classes)) is not None:
        return metric
    if given not in _NAMED:
        raise ConfigurationError(unknown("metric", given, [*_NAMED, *NAMES, "top5_accuracy"]))
    measure, finish = _NAMED[given]
    return MeanMetric(name, lambda output: measure(given, output), finish)


def _loss(output: EvaluationOutput) -> Measured | None:
    return None if output.loss_sum is None else (output.loss_sum, output.weight)


def _perplexity(name: str, output: EvaluationOutput) -> Measured:
    if output.loss_sum is None:
        raise ConfigurationError(f"The metric {name!r} is made from the loss, and the step returned none.")
    return output.loss_sum, output.weight


def _accuracy(name: str, output: EvaluationOutput) -> Measured:
    predictions, labels = output.predictions, output.labels
    if isinstance(predictions, (list, tuple)) and isinstance(labels, (list, tuple)) and _are_plain(predictions, labels):
        return float(sum(one == other for one, other in zip(predictions, labels, strict=True))), float(len(labels))
    scores, labels = _tensors(name, output)
    counted = labels != IGNORE_INDEX
    right = (chosen_classes(name, scores, labels) == labels) & counted
    return right.sum(), counted.sum()


def _top_accuracy(name: str, output: EvaluationOutput, k: int) -> Measured:
    scores, labels = _tensors(name, output)
    if scores.shape[:-1] != labels.shape or scores.shape[-1] < k:
        raise ConfigurationError(
            f"The metric {name!r} needs at least {k} scores for each label, in the last dimension; predictions are "
            f"{tuple(scores.shape)} and labels {tuple(labels.shape)}."
        )
    counted = labels != IGNORE_INDEX
    right = (scores.topk(k, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1) & counted
    return right.sum(), counted.sum()


def _squared_error(name: str, output: EvaluationOutput) -> Measured:
    difference = _difference(name, output)
    return difference.square().sum(dtype=accurate(difference.device)), float(difference.numel())


def _absolute_error(name: str, output: EvaluationOutput) -> Measured:
    difference = _difference(name, output)
    return difference.abs().sum(dtype=accurate(difference.device)), float(difference.numel())


def _difference(name: str, output: EvaluationOutput) -> Tensor:
    predictions, labels = _tensors(name, output)
    if predictions.numel() != labels.numel():  # broadcast, they would give a number too
        raise ConfigurationError(
            f"The metric {name!r} compares value by value; predictions are {tuple(predictions.shape)} and labels "
            f"{tuple(labels.shape)}."
        )
    return predictions.reshape(labels.shape).float() - labels.float()


def chosen_classes(name: str, scores: Tensor, labels: Tensor) -> Tensor:
    """Return the classes with the highest scores, where there are scores; whole numbers are classes already.

    The scores of a label are in the last dimension or else in the second one, as torch's cross entropy has them.
    """
    if scores.ndim == labels.ndim + 1 and scores.shape[:-1] == labels.shape and scores.shape[-1] > 1:
        return scores.argmax(dim=-1)
    if scores.ndim == labels.ndim + 1 and scores.ndim > 2 and scores.shape[:1] + scores.shape[2:] == labels.shape:
        return scores.argmax(dim=1)
    if scores.shape == labels.shape and not scores.is_floating_point():
        return scores
    raise ConfigurationError(
        f"The metric {name!r} needs a score for each class, or the classes as whole numbers; predictions are "
        f"{tuple(scores.shape)} ({scores.dtype}) and labels {tuple(labels.shape)}. Give a function of predictions and "
        "labels that says how to compare them."
    )


def _tensors(name: str, output: EvaluationOutput) -> tuple[Tensor, Tensor]:
    predictions, labels = output.predictions, output.labels
    if isinstance(predictions, (list, tuple)) and predictions and isinstance(predictions[0], Tensor):
        predictions = predictions[0]  # the logits come first
    if not isinstance(predictions, Tensor) or not isinstance(labels, Tensor):
        raise ConfigurationError(
            f"The metric {name!r} compares tensors; predictions are a {type(predictions).__name__} and labels a "
            f"{type(labels).__name__}. Give a function of predictions and labels, or a dataset with labels."
        )
    return predictions, labels


def _are_plain(*rows: Sequence[Any]) -> bool:
    return not any(isinstance(item, Tensor) for one in rows for item in one)


def _exponential(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def _unchanged(mean: float) -> float:
    return mean


_NAMED: dict[str, tuple[Callable[[str, EvaluationOutput], Measured], Callable[[float], float]]] = {
    "accuracy": (_accuracy, _unchanged),
    "mse": (_squared_error, _unchanged),
    "rmse": (_squared_error, math.sqrt),
    "mae": (_absolute_error, _unchanged),
    "perplexity": (_perplexity, _exponential),
}
