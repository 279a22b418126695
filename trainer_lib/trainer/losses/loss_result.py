"""Losses as sums over items, so that batches and ranks of any size add up to one mean."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, are_valid

Weight = float | Tensor
_FEW = 256


class LossResult(NamedTuple):
    """The result of `compute_loss` for a batch.

    Attributes:
        loss: With `weight` the sum of the losses of the items; without it their mean over the items that
            `Trainer.num_items` counts.
        weight: The number of items: valid tokens, samples, pixels.
        outputs: The model's outputs, for callbacks and metrics.
        logs: Further values to log, averaged with the same weight: numbers or tensors by name.

    Example:
        >>> LossResult(torch.tensor(6.0), weight=3)[:2]
        (tensor(6.), 3)
        >>> LossResult(torch.tensor(6.0), weight=3).mean
        tensor(2.)
    """

    loss: Tensor
    weight: Weight | None = None
    outputs: Any = None
    logs: Mapping[str, float | Tensor] | None = None

    @property
    def mean(self) -> Tensor:
        """The mean over the items, with its graph; 0 without items."""
        if isinstance(self.weight, Tensor):  # read on the device alone
            return self.loss / (self.weight + (self.weight == 0))
        return self.loss / (self.weight or 1)


SummedLoss = Callable[[Any, Any], tuple[Tensor, Weight]]


def summed(loss_fn: Any) -> SummedLoss | None:
    """Return a function of outputs and targets that computes a loss as (sum, weight).

    Returns `None` for a custom loss function, which returns a mean over the items that `num_items` counts.

    Raises:
        ConfigurationError: If the loss function does not average.
    """
    function, options = loss_fn, {}
    if isinstance(loss_fn, functools.partial):
        function, options = loss_fn.func, loss_fn.keywords
    kind: Any = type(function) if isinstance(function, nn.Module) else function
    count = _COUNTS.get(kind)
    _check_averages(getattr(function, "reduction", options.get("reduction", "mean")))
    if count is None or (isinstance(loss_fn, functools.partial) and loss_fn.args):
        return None
    if isinstance(function, nn.Module):
        return lambda outputs, targets: (_sum_of(function, outputs, targets), count(function, outputs, targets))
    total = functools.partial(function, **{**options, "reduction": "sum"})
    settings = _Settings(options)
    return lambda outputs, targets: (total(outputs, targets), count(settings, outputs, targets))


def ignored_label(loss_fn: Any) -> int:
    """Return the label that a loss function ignores: its `ignore_index`, by default -100.

    Example:
        >>> ignored_label(nn.CrossEntropyLoss(ignore_index=255)), ignored_label(nn.functional.mse_loss)
        (255, -100)
    """
    options = getattr(loss_fn, "keywords", {})
    ignored = getattr(getattr(loss_fn, "func", loss_fn), "ignore_index", options.get("ignore_index"))
    return ignored if type(ignored) is int else IGNORE_INDEX


def on_host(tensor: Tensor) -> Tensor:
    """Return what a tensor of the batch was on the host; the tensor itself where that is not known."""
    if tensor.is_cpu:
        return tensor
    from trainer_lib.data_loader.host_values import host_value

    return host_value(tensor)


def count_valid(labels: Tensor, ignored: int = IGNORE_INDEX) -> Weight:
    """Return the number of labels that are not ignored: a tensor where only an accelerator knows them."""
    if not labels.is_cpu:
        labels = on_host(labels)
    if labels.dtype is torch.uint8:  # as in are_valid, which would be one more call in each step
        labels = labels.long()
    if not labels.is_cpu:
        return torch.count_nonzero(labels != ignored)
    if labels.ndim == 1 and labels.numel() <= _FEW:  # for a few labels Python is faster than torch
        return float(labels.numel() - labels.tolist().count(ignored))
    return float(torch.count_nonzero(labels != ignored))


def _sum_of(function: nn.Module, outputs: Any, targets: Any) -> Tensor:
    """Return the sum of a loss module's losses, with its current attributes."""
    attributes = function.__dict__
    reduction = attributes["reduction"]
    _check_averages(reduction)
    attributes["reduction"] = "sum"
    try:
        return function(outputs, targets)
    finally:
        attributes["reduction"] = reduction


def _check_averages(reduction: str) -> None:
    if reduction not in ("mean", "batchmean"):
        raise ConfigurationError(
            "loss_fn must have reduction='mean', so that losses of batches and ranks can be combined (got "
            f"{reduction!r}). Leave reduction out, or return LossResult(loss_sum, weight=n) from compute_loss."
        )


class _Settings:
    """The options of a loss function, as attributes like those of the loss module."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.ignore_index: int = options.get("ignore_index", IGNORE_INDEX)
        self.weight: Tensor | None = options.get("weight")
        self.reduction: str = options.get("reduction", "mean")


def _targets(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    """Return the weight by which cross entropy divides."""
    if targets.is_floating_point():  # probabilities of the classes, along dimension 1
        classes = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
        return targets.numel() / classes
    weight = settings.weight
    if weight is None:
        return count_valid(targets, settings.ignore_index)
    valid = are_valid(targets, settings.ignore_index)
    # The valid targets alone would have a size that the host had to wait for.
    classes = targets.where(valid, 0).long()  # an index in bytes is a mask for torch
    return torch.where(valid, weight[classes], 0.0).sum()


def _elements(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    del settings
    if outputs.shape == targets.shape:
        return float(outputs.numel())
    return float(math.prod(torch.broadcast_shapes(outputs.shape, targets.shape)))


def _weighted_elements(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    """Return the weight by which the functions divide that take weights of elements and average with them."""
    weight = settings.weight
    return _elements(settings, outputs, targets) if weight is None else weight.sum()


def _samples(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    del settings, targets
    return float(outputs.shape[0]) if outputs.ndim > 1 else 1.0


def _rows_of_classes(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    """Return the number of rows, where a loss averages over classes in the last dimension."""
    del settings, targets
    return float(outputs.numel() / outputs.shape[-1])


def _divergence(settings: Any, outputs: Tensor, targets: Tensor) -> Weight:
    averages_samples = settings.reduction == "batchmean"
    return float(outputs.shape[0]) if averages_samples else _elements(settings, outputs, targets)


# Exact classes and functions: a subclass may compute something else.
_COUNTS: dict[Any, Callable[[Any, Tensor, Tensor], Weight]] = {
    nn.CrossEntropyLoss: _targets,
    nn.NLLLoss: _targets,
    F.cross_entropy: _targets,
    F.nll_loss: _targets,
    nn.MSELoss: _elements,
    nn.L1Loss: _elements,
    nn.SmoothL1Loss: _elements,
    nn.HuberLoss: _elements,
    nn.BCELoss: _elements,
    nn.BCEWithLogitsLoss: _elements,
    nn.PoissonNLLLoss: _elements,
    nn.SoftMarginLoss: _elements,
    nn.HingeEmbeddingLoss: _elements,
    F.mse_loss: _weighted_elements,
    F.l1_loss: _weighted_elements,
    F.smooth_l1_loss: _elements,
    F.huber_loss: _elements,
    F.binary_cross_entropy: _elements,
    F.binary_cross_entropy_with_logits: _elements,
    F.poisson_nll_loss: _elements,
    F.soft_margin_loss: _elements,
    F.hinge_embedding_loss: _elements,
    nn.MultiMarginLoss: _samples,
    nn.MultiLabelMarginLoss: _samples,
    nn.MultiLabelSoftMarginLoss: _rows_of_classes,
    F.multi_margin_loss: _samples,
    F.multilabel_margin_loss: _samples,
    F.multilabel_soft_margin_loss: _rows_of_classes,
    nn.KLDivLoss: _divergence,
    F.kl_div: _divergence,
}
