"""Metrics as running sums: exact on any number of ranks, in constant memory."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.device_types import sum_dtype
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException, unknown
from trainer_lib.foundation.tensors.batch_fields import are_valid
from trainer_lib.logging import get_logger
from trainer_lib.trainer.data.batch_rows import count_output_rows, take_rows
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.losses.loss_result import count_valid

_logger = get_logger(__name__)

_ROUNDING, _TINY = 1e-3, 1e-6  # relative, as of means in 16 bits, and absolute, as of differences around 0
_COMPARED = 2  # the batch at which a function is tried: the value of a single batch is exact
Weight = float | Tensor
Measured = tuple[Tensor | float, Weight]
MeanState = tuple[float, float, bool, int, int]


class MeanMetric(Metric):
    """A mean over the items of all batches.

    Args:
        name: The name of the metric.
        measure: Returns the sum of a batch and its number of items; `None` if the batch has no value.
        finish: A function of the mean that returns the metric.
    """

    def __init__(
        self,
        name: str,
        measure: Callable[[EvaluationOutput], Measured | None],
        finish: Callable[[float], float] = lambda mean: mean,
    ) -> None:
        super().__init__(name)
        self._measure = measure
        self.finish: Callable[[float], float] = finish

    def begin(self, device: torch.device) -> None:
        """Reset the metric."""
        self._sum, self._num_missing = RunningSum(device), 0

    def measured(self, output: EvaluationOutput) -> dict[str, Measured]:
        """Return the sum and weight of a batch by name; an empty dict if the batch has no value."""
        measured = self._measure(output)
        return {} if measured is None else {self.name: measured}

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        measured = self._measure(output)
        if measured is None:
            self._num_missing += 1
        else:
            self._sum.add(*measured)

    def state(self) -> MeanState:
        """Return the sum, the weight, whether any batch had a value, how many had none, and the rank."""
        from trainer_lib.state.partial_state import PartialState

        return *self._sum.read(), self._num_missing, PartialState().process_index

    def result(self, states: Sequence[MeanState]) -> Any:
        """Return the mean over all ranks; an empty dict if no batch had a value.

        Raises:
            DistributedOperationException: If only some batches had a value.
        """
        if not any(state[2] for state in states):
            return {}
        missing = [f"{count} on rank {rank}" for _, _, _, count, rank in states if count]
        if missing:
            raise DistributedOperationException(
                f"Some batches have no {self.name}, and others have one: {', '.join(missing)} have none. Check that "
                "all batches have labels: the dataset and the collate function must return the same keys on all ranks."
            )
        total, weight = sum(state[0] for state in states), sum(state[1] for state in states)
        return self.finish(total / weight) if weight else math.nan


class FunctionMetric(Metric):
    """The mean of a function of predictions and labels, which returns one value per row or the mean over its rows.

    Args:
        name: The name of the metric.
        function: The function; it may return several values by name.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name)
        self._function = function
        self._batches = 0  # of all evaluations
        self._returns_numbers = False  # instead of values for each row

    def begin(self, device: torch.device) -> None:
        """Reset the metric."""
        self._device = device
        self._sums: dict[str | None, RunningSum] = {}

    def measured(self, output: EvaluationOutput) -> dict[str, Measured]:
        """Return the sums and weights of a batch by name."""
        return {self.name if key is None else f"{self.name}_{key}": part for key, part in self._measure(output).items()}

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        measured = self._measure(output)
        self._check_mean(output, measured)
        for key, part in measured.items():
            if key not in self._sums:
                self._sums[key] = RunningSum(self._device)
            self._sums[key].add(*part)

    def _measure(self, output: EvaluationOutput) -> dict[str | None, Measured]:
        value = self._function(output.predictions, output.labels)
        named: Mapping[str | None, Any] = value if isinstance(value, Mapping) else {None: value}
        rows = count_output_rows(output.predictions, output.labels)
        if rows is None:
            raise ConfigurationError(f"The metric {self.name!r} needs predictions and labels with rows.")
        return {key: self._over_rows(key, part, rows) for key, part in named.items()}

    def _check_mean(self, output: EvaluationOutput, measured: Mapping[str | None, Measured]) -> None:
        """Warn, at the second batch of the first evaluation, if a number is not the mean of those of two halves."""
        self._batches += 1
        rows = count_output_rows(output.predictions, output.labels) or 0
        if self._batches != _COMPARED or not self._returns_numbers or rows < 2:
            return
        try:
            of_halves = [self._measure(half) for half in _halves(output, rows)]
        except Exception:  # noqa: BLE001 - the function is the user's, and need not take half a batch
            return
        for key, (total, _) in measured.items():
            whole = float(total) / rows
            mean = sum(float(half[key][0]) for half in of_halves if key in half) / rows
            if math.isfinite(whole - mean) and not math.isclose(whole, mean, rel_tol=_ROUNDING, abs_tol=_TINY):
                _logger.warning(
                    "The metric %r is not a mean over rows: it is %.4g for a batch of %d rows, and %.4g as the mean of "
                    "its two halves. Its mean over batches depends on the batch size and the number of ranks. Give a "
                    "function of all rows at once as compute_metrics, or an object with update and compute.",
                    self.name if key is None else f"{self.name}_{key}",
                    whole,
                    rows,
                    mean,
                )

    def state(self) -> dict[str | None, tuple[float, float, bool]]:
        """Return the sums and weights."""
        return {key: running_sum.read() for key, running_sum in self._sums.items()}

    def result(self, states: Sequence[dict[str | None, tuple[float, float, bool]]]) -> Any:
        """Return the means over all ranks."""
        names = [list(state) for state in states]
        if any(set(other) != set(names[0]) for other in names):
            raise DistributedOperationException(
                f"The metric {self.name!r} returned different names on different ranks: {names}. Return the same names "
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
            self._returns_numbers = self._returns_numbers or rows > 1
            return values.reshape(()).to(self._device).double() * rows, float(rows)
        if values.ndim == 1 and len(values) == rows:
            return values.to(self._device).sum(dtype=sum_dtype(self._device)), float(rows)
        metric = f"{self.name}[{key!r}]" if key is not None else self.name
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"The metric {metric} returned a {type(value).__name__}{shape} for a batch of {rows} rows. Return one "
            "value per row, or their mean; give a metric that needs all rows at once as compute_metrics."
        )


def _halves(output: EvaluationOutput, rows: int) -> list[EvaluationOutput]:
    halves: list[EvaluationOutput] = []
    for start, stop in ((0, rows // 2), (rows // 2, rows)):
        predictions, labels = take_rows((output.predictions, output.labels), start, stop, rows)
        halves.append(EvaluationOutput(predictions=predictions, labels=labels))
    return halves


class RunningSum:
    """A sum and its weight, kept on a device; only `read` waits for the device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=sum_dtype(device), device=device)
        self._weight: Weight = 0.0
        self._has_values = False

    def add(self, total: Tensor | float, weight: Weight) -> None:
        """Add the sum of `weight` items; with weight 0 the sum is ignored, even if it is NaN."""
        self._has_values = True
        if isinstance(weight, Tensor):
            weight = weight.detach().to(self._total)
            total = torch.where(weight > 0, total, 0.0)
        elif not weight:
            return
        self._total += total.detach() if isinstance(total, Tensor) else total
        self._weight = self._weight + weight

    def read(self) -> tuple[float, float, bool]:
        """Return the sum, the weight, and whether anything was added."""
        return float(self._total), float(self._weight), self._has_values


def mean_loss() -> MeanMetric:
    """Return the evaluation loss as a metric."""
    return MeanMetric("loss", _loss)


def named_metric(kind: str, name: str) -> Metric:
    """Return the metric of a kind such as "accuracy" or "top5_accuracy".

    Raises:
        ConfigurationError: If the kind is unknown.
    """
    from trainer_lib.trainer.metrics.classification import NAMES, classification_metric

    if top := re.fullmatch(r"top_?([1-9]\d*)_accuracy", kind):
        k = int(top[1])
        return MeanMetric(name, lambda output: _top_accuracy(kind, output, k))
    if (metric := classification_metric(kind, name, _tensors, chosen_classes)) is not None:
        return metric
    if kind not in _NAMED:
        raise ConfigurationError(unknown("metric", kind, [*_NAMED, *NAMES, "top5_accuracy"]))
    measure, finish = _NAMED[kind]
    return MeanMetric(name, lambda output: measure(kind, output), finish)


def _loss(output: EvaluationOutput) -> Measured | None:
    return None if output.loss_sum is None else (output.loss_sum, output.weight)


def _perplexity(name: str, output: EvaluationOutput) -> Measured:
    if output.loss_sum is None:
        raise ConfigurationError(f"The metric {name!r} needs the loss, and the evaluation step returned none.")
    return output.loss_sum, output.weight


def _accuracy(name: str, output: EvaluationOutput) -> Measured:
    predictions, labels = output.predictions, output.labels
    if isinstance(predictions, (list, tuple)) and isinstance(labels, (list, tuple)) and _are_plain(predictions, labels):
        pairs = zip(predictions, labels, strict=True)
        return float(sum(prediction == label for prediction, label in pairs)), float(len(labels))
    scores, labels = _tensors(name, output)
    return _correct(chosen_classes(name, scores, labels) == labels, labels, output.ignored_label)


def _top_accuracy(name: str, output: EvaluationOutput, k: int) -> Measured:
    scores, labels = _tensors(name, output)
    if scores.shape[:-1] != labels.shape or scores.shape[-1] < k:
        raise ConfigurationError(
            f"The metric {name!r} needs at least {k} scores for each label, in the last dimension (got predictions of "
            f"shape {tuple(scores.shape)} and labels of shape {tuple(labels.shape)})."
        )
    hits = (scores.topk(k, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1)
    return _correct(hits, labels, output.ignored_label)


def _correct(hits: Tensor, labels: Tensor, ignored: int) -> Measured:
    """Return how many labels that count are hit, and how many count."""
    count = count_valid(labels, ignored)
    if isinstance(count, Tensor) or count < labels.numel():
        hits = hits & are_valid(labels, ignored)
    return hits.sum(), count


def _squared_error(name: str, output: EvaluationOutput) -> Measured:
    difference = _difference(name, output)
    return difference.square().sum(dtype=sum_dtype(difference.device)), float(difference.numel())


def _absolute_error(name: str, output: EvaluationOutput) -> Measured:
    difference = _difference(name, output)
    return difference.abs().sum(dtype=sum_dtype(difference.device)), float(difference.numel())


def _difference(name: str, output: EvaluationOutput) -> Tensor:
    predictions, labels = _tensors(name, output)
    if predictions.numel() != labels.numel():  # torch would broadcast them
        raise ConfigurationError(
            f"The metric {name!r} needs as many predictions as labels (got shapes {tuple(predictions.shape)} and "
            f"{tuple(labels.shape)})."
        )
    return predictions.reshape(labels.shape).float() - labels.float()


def chosen_classes(name: str, scores: Tensor, labels: Tensor) -> Tensor:
    """Return the class with the highest score for each label; whole numbers are classes already.

    The scores of a label are in the last dimension or in the second, as in torch's cross entropy.
    """
    if scores.ndim == labels.ndim + 1 and scores.shape[:-1] == labels.shape and scores.shape[-1] > 1:
        return scores.argmax(dim=-1)
    if scores.ndim == labels.ndim + 1 and scores.ndim > 2 and scores.shape[:1] + scores.shape[2:] == labels.shape:
        return scores.argmax(dim=1)
    if scores.shape == labels.shape and not scores.is_floating_point():
        return scores
    advice = "Give a function of predictions and labels that compares them."
    if scores.shape == labels.shape and _are_probabilities(labels):
        advice = (
            "The labels are probabilities of classes, as Mixup and CutMix make them in training. Give the metric as "
            "metrics=… for evaluations, whose data is not mixed, or compare the classes of the highest probability: "
            'train_metrics={"accuracy": lambda scores, labels: (scores.argmax(1) == labels.argmax(1)).float()}.'
        )
    elif scores.is_floating_point() and scores.shape == labels.shape:
        advice = (
            "One score per label needs a threshold, 0 for logits or 0.5 for probabilities. The accuracy is "
            'metrics={"accuracy": lambda scores, labels: ((scores > 0) == (labels > 0)).float().mean()}.'
        )
    raise ConfigurationError(
        f"The metric {name!r} needs a score for each class, or classes as whole numbers (got predictions of shape "
        f"{tuple(scores.shape)}, {scores.dtype}, and labels of shape {tuple(labels.shape)}). {advice}"
    )


def _tensors(name: str, output: EvaluationOutput) -> tuple[Tensor, Tensor]:
    predictions, labels = output.predictions, output.labels
    if isinstance(predictions, (list, tuple)) and predictions and isinstance(predictions[0], Tensor):
        predictions = predictions[0]  # the logits come first
    if predictions is None:
        raise ConfigurationError(
            f"The metric {name!r} needs predictions, and compute_loss returned a loss without the model's outputs. "
            "Return both: (loss, outputs)."
        )
    if not isinstance(predictions, Tensor) or not isinstance(labels, Tensor):
        raise ConfigurationError(
            f"The metric {name!r} needs tensors (got predictions of type {type(predictions).__name__} and labels of "
            f"type {type(labels).__name__}). Give a function of predictions and labels, or a dataset with labels."
        )
    if output.shifted_labels is labels and predictions.shape[:2] == labels.shape:
        return predictions[:, :-1], labels[:, 1:]
    return predictions, labels


def _are_probabilities(labels: Tensor) -> bool:
    """Whether labels are probabilities of several classes, which add up to 1."""
    if labels.ndim < 2 or labels.shape[1] < 2 or not labels.is_floating_point():
        return False
    return bool((labels >= 0).all()) and torch.allclose(labels.sum(dim=1), torch.ones(()).to(labels), atol=1e-4)


def _are_plain(*rows: Sequence[Any]) -> bool:
    return not any(isinstance(item, Tensor) for row in rows for item in row)


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
