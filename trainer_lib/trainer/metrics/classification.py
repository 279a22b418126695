"""F1, precision, recall and AUROC: exact on any number of ranks and for any batch size."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import are_valid
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric

Array = np.ndarray[Any, Any]
Classes = Callable[[str, Tensor, Tensor], Tensor]  # returns the class with the highest score for each label
Tensors = Callable[[str, EvaluationOutput], tuple[Tensor, Tensor]]


_BY_COUNTS = re.compile(r"(f1|precision|recall)(?:_(macro|micro|weighted))?")
_OF_CLASS_1 = 1


class Counts(NamedTuple):
    """Counts for each class: correct predictions, predictions, and labels."""

    correct: Array
    predicted: Array
    actual: Array


class CountedMetric(Metric):
    """F1, precision or recall, from counts for each class.

    Args:
        name: The name of the metric, without a prefix.
        kind: "f1", "precision" or "recall", alone or with "_macro", "_micro" or "_weighted". Alone it is that of class
            1 for two classes, and the macro average for more.
        tensors: Returns predictions and labels of a batch.
        classes: Returns the predicted classes.
    """

    def __init__(self, name: str, kind: str, tensors: Tensors, classes: Classes) -> None:
        super().__init__(name)
        match = _BY_COUNTS.fullmatch(kind)
        assert match is not None
        self._kind, self._average = match[1], match[2]
        self._tensors, self._classes = tensors, classes

    def begin(self, device: torch.device) -> None:
        """Reset the metric."""
        self._counts = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self._num_scores = 0

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        scores, labels = self._tensors(self.name, output)
        classes = self._classes(self.name, scores, labels)
        valid = are_valid(labels, output.ignored_label)
        predicted, actual = classes[valid].flatten().long(), labels[valid].flatten().long()
        if scores.ndim > labels.ndim:
            self._num_scores = max(self._num_scores, scores.shape[-1 if scores.shape[:-1] == labels.shape else 1])
        if not len(actual):
            return
        if int(actual.min()) < 0 or int(predicted.min()) < 0:
            raise ConfigurationError(
                f"The metric {self.name!r} needs labels of at least 0 (got {int(actual.min())}). Number the classes "
                f"from 0; labels of {output.ignored_label} are ignored."
            )
        size = max(self._counts.shape[1], int(actual.max()) + 1, int(predicted.max()) + 1)
        parts = (actual[predicted == actual], predicted, actual)
        added = torch.stack([torch.bincount(part, minlength=size) for part in parts])
        added[:, : self._counts.shape[1]] += self._counts.to(added.device)
        self._counts = added

    def state(self) -> tuple[list[list[int]], int]:
        """Return the counts, and the number of scores per label."""
        return self._counts.tolist(), self._num_scores

    def result(self, states: Sequence[tuple[list[list[int]], int]]) -> float:
        """Return the value over all ranks."""
        size = max([2, *(num_scores for _, num_scores in states), *(len(counts[0]) for counts, _ in states)])
        total = np.zeros((3, size), dtype=np.int64)
        for counts, _ in states:
            total[:, : len(counts[0])] += np.array(counts, dtype=np.int64)
        return _averaged(self._kind, self._average or ("class 1" if size == 2 else "macro"), Counts(*total))


class Auroc(Metric):
    """The area under the ROC curve; with more than two classes the mean of each class against the rest.

    It keeps the scores of all rows until the end: 4 bytes per score, and one score per row for two classes.

    Args:
        name: The name of the metric, without a prefix.
        tensors: Returns predictions and labels of a batch.
    """

    def __init__(self, name: str, tensors: Tensors) -> None:
        super().__init__(name)
        self._tensors = tensors

    def begin(self, device: torch.device) -> None:
        """Reset the metric."""
        self._scores: list[Array] = []
        self._labels: list[Array] = []

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        scores, labels = self._tensors(self.name, output)
        if scores.ndim == labels.ndim + 1 and scores.shape[:-1] == labels.shape:
            scores = scores.reshape(-1, scores.shape[-1])
        elif scores.shape == labels.shape and scores.is_floating_point():
            scores = scores.reshape(-1, 1)
        else:
            raise ConfigurationError(
                f"The metric {self.name!r} needs a score for each class in the last dimension, or one score per label "
                f"(got predictions of shape {tuple(scores.shape)}, {scores.dtype}, and labels of shape "
                f"{tuple(labels.shape)})."
            )
        valid = are_valid(labels.flatten(), output.ignored_label)
        scores = scores[valid].float()
        if scores.shape[1] == 2:  # has the order of the probabilities of class 1, without their rounding
            scores = scores[:, 1:] - scores[:, :1]
        elif scores.shape[1] > 2:
            scores = scores.double().softmax(dim=1).float() if not _are_probabilities(scores) else scores
        self._scores.append(scores.cpu().numpy())
        self._labels.append(labels.flatten()[valid].cpu().numpy())

    def state(self) -> tuple[Array, Array]:
        """Return the scores and labels of this rank."""
        return np.concatenate(self._scores), np.concatenate(self._labels)

    def result(self, states: Sequence[tuple[Array, Array]]) -> float:
        """Return the area over all ranks; NaN if a class has no label."""
        scores = np.concatenate([state[0] for state in states])
        labels = np.concatenate([state[1] for state in states])
        if scores.shape[1] == 1:
            return _area(scores[:, 0], labels == _OF_CLASS_1)
        return float(np.mean([_area(scores[:, index], labels == index) for index in range(scores.shape[1])]))


def classification_metric(kind: str, name: str, tensors: Tensors, classes: Classes) -> Metric | None:
    """Return the metric of a kind such as "f1_macro"; `None` for an unknown kind."""
    if kind in ("auroc", "roc_auc"):
        return Auroc(name, tensors)
    return CountedMetric(name, kind, tensors, classes) if _BY_COUNTS.fullmatch(kind) else None


NAMES = ("f1", "precision", "recall", "f1_macro", "auroc")


def _averaged(kind: str, average: str, counts: Counts) -> float:
    if average == "micro":
        return float(_values(kind, Counts(*(part.sum(keepdims=True) for part in counts)))[0])
    values = _values(kind, counts)
    if average == "class 1":
        return float(values[_OF_CLASS_1])
    present = (counts.predicted + counts.actual) > 0  # leaves out classes without predictions and labels
    if not present.any():
        return math.nan
    weights = counts.actual[present] if average == "weighted" else None
    if weights is not None and not weights.sum():
        return math.nan
    return float(np.average(values[present], weights=weights))


def _values(kind: str, counts: Counts) -> Array:
    """Return the value of each class; 0 for 0/0."""
    parts = {"precision": (1, counts.predicted), "recall": (1, counts.actual)}
    factor, divisor = parts.get(kind, (2, counts.predicted + counts.actual))
    return factor * counts.correct / np.maximum(divisor, 1)


def _are_probabilities(scores: Tensor) -> bool:
    return bool((scores >= 0).all()) and torch.allclose(scores.sum(dim=1), torch.ones(()).to(scores), atol=1e-4)


def _area(scores: Array, positive: Array) -> float:
    """Return the fraction of pairs of a positive and a negative row in which the positive row has the higher score."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return math.nan
    _, index, count = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks = (last - (count - 1) / 2)[index]  # equal scores share a rank
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
