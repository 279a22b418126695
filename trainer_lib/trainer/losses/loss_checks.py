"""Checks that a loss is a scalar, and that outputs and targets fit the loss function."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, are_valid
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.losses.model_io import as_mapping
from trainer_lib.trainer.safety.error_context import described, kind

# A target is the index of a class.
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
# A target is a value; torch would broadcast tensors of different shapes.
_VALUE_LOSSES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)


def check_loss(loss: Any, source: str) -> None:
    """Check that a loss is a scalar tensor.

    Args:
        loss: The loss.
        source: What returned the loss, for the error.

    Raises:
        ConfigurationError: If the loss is not a floating-point scalar.
    """
    if not isinstance(loss, Tensor):
        hint = " Return the tensor without calling .item() or float()." if isinstance(loss, (int, float)) else ""
        hint = hint or (" Is a return missing?" if loss is None else "")
        hint = hint or (" super().compute_loss(…).mean is that of a LossResult." if isinstance(loss, tuple) else "")
        raise ConfigurationError(
            f"{source} returned a {type(loss).__name__} as the loss. Return a scalar tensor.{hint}"
        )
    if loss.ndim:
        raise ConfigurationError(
            f"{source} returned a loss of shape {tuple(loss.shape)}. Return a scalar: its mean, or "
            "LossResult(loss.sum(), weight=number of items)."
        )
    if not loss.is_floating_point():
        raise ConfigurationError(f"{source} returned a loss of dtype {kind(loss)}. Return a floating-point loss.")


def check_weight(weight: Any, source: str) -> None:
    """Check that the weight of a loss is a number."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
        value = kind(weight) if isinstance(weight, Tensor) else repr(weight)
        raise ConfigurationError(f"{source} must be a number of items of at least 0, got {value}.")


def check_result(result: Any) -> None:
    """Check the result of a user's `training_step`.

    Raises:
        ConfigurationError: If it is not a `LossResult` with a weight.
    """
    if not isinstance(result, LossResult):
        raise ConfigurationError(
            f"training_step returned a {type(result).__name__}. Return LossResult(loss_sum, weight=number of items) "
            "after self.backward(loss_sum, weight), or return None and log the loss yourself."
        )
    check_weight(result.weight, "The weight of the LossResult that training_step returned")


def no_gradients(has_own_step: bool) -> NoReturn:
    """Raise an error because no trained parameter got a gradient."""
    reason = (
        "training_step must call self.backward(loss)"
        if has_own_step
        else "the loss depends on none of the optimizer's parameters"
    )
    raise ConfigurationError(
        f"No parameter of the optimizer got a gradient, so nothing would be trained: {reason}. Check that the "
        "optimizer was made from this model, after its last change."
    )


def _texts(targets: Any) -> list[str] | None:
    """Return the targets as a list if they are texts."""
    rows: list[Any] = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    return rows if rows and all(isinstance(row, str) for row in rows) else None


def check_compared(function: Any, name: str, outputs: Any, targets: Any, ignored: int = IGNORE_INDEX) -> None:
    """Check the outputs and targets of one of torch's losses, for errors that torch does not report clearly.

    On an accelerator a target out of range ends the process without naming it, and torch broadcasts values of
    different shapes.

    Args:
        function: The loss, as a function or a module.
        name: The name of the loss, for errors.
        outputs: The model's outputs.
        targets: The batch's targets.
        ignored: The target that the loss ignores.

    Raises:
        ConfigurationError: If outputs and targets cannot be compared.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        if (texts := _texts(targets)) is not None:
            raise ConfigurationError(
                f"loss_fn {name} needs numbers as targets, got texts such as {shown(texts[0])}. Give each class a "
                "number in the dataset: names = sorted(set(labels)); "
                "targets = [names.index(label) for label in labels]."
            )
        if not isinstance(outputs, Tensor):
            problem = f"the model returned {_with_fields(outputs)}"
        else:
            problem = f"the targets are {_with_fields(targets)}"
        raise ConfigurationError(
            f"loss_fn {name} compares tensors, and {problem}. Return the predictions as a tensor (or as `logits` of "
            "several values), or override compute_loss(model, batch)."
        )
    function = type(function) if isinstance(function, nn.Module) else function
    if function in _VALUE_LOSSES and outputs.shape != targets.shape:
        hint = ""
        if outputs.numel() == targets.numel():
            hint = " Reshape the targets, for example targets[:, None], or squeeze the model's outputs."
        raise ConfigurationError(
            f"loss_fn {name} needs outputs and targets of the same shape, got {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}.{hint}"
        )
    if function in _CLASS_LOSSES:
        _check_classes(name, outputs, targets, ignored)


def comparison_error(error: Exception, name: str, outputs: Any, targets: Any) -> ConfigurationError:
    """Return an error of one of torch's losses that describes outputs and targets."""
    return ConfigurationError(
        f"loss_fn {name} cannot compare outputs {described(outputs)} with targets {described(targets)}: {error}"
    )


def _check_classes(name: str, outputs: Tensor, targets: Tensor, ignored: int) -> None:
    are_probabilities = targets.is_floating_point() and targets.shape == outputs.shape
    if are_probabilities:
        return
    requirement = f"loss_fn {name} needs class indices as targets"
    if targets.is_floating_point() and targets.ndim == outputs.ndim > 1 and len(targets) == len(outputs):
        raise ConfigurationError(
            f"loss_fn {name} compares class probabilities with scores of the same shape, got targets of "
            f"{tuple(targets.shape)} and outputs of {tuple(outputs.shape)}. Give the model one output per class "
            f"({targets.shape[1]}), or make targets for {outputs.shape[1]} classes (Mixup and CutMix: num_classes). "
            "For values instead of classes use torch.nn.functional.mse_loss."
        )
    if targets.dtype not in (torch.int64, torch.uint8):
        raise ConfigurationError(
            f"{requirement}, as int64, got {kind(targets)}. Give targets.long(), or for values instead of classes use "
            "torch.nn.functional.mse_loss."
        )
    _check_class_shape(requirement, outputs, targets)
    _check_class_range(requirement, outputs, targets, ignored)


def _check_class_shape(requirement: str, outputs: Tensor, targets: Tensor) -> None:
    expected = (outputs.shape[0], *outputs.shape[2:]) if outputs.ndim > 1 else ()
    if targets.shape != expected:
        hint = " The classes must be the second dimension: (samples, classes, …)." if outputs.ndim > 2 else ""
        if targets.numel() == outputs.numel() // max(1, outputs.shape[-1]):
            hint = hint or f" Give targets.reshape({', '.join(map(str, expected)) or '()'})."
        raise ConfigurationError(
            f"{requirement}, of shape {expected} for outputs of shape {tuple(outputs.shape)}, got "
            f"{tuple(targets.shape)}.{hint}"
        )


def _check_class_range(requirement: str, outputs: Tensor, targets: Tensor, ignored: int) -> None:
    classes = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    counted = targets[are_valid(targets, ignored)]
    if not counted.numel():
        return
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        hint = f", give the model {high + 1} outputs" if high >= classes else ""
        raise ConfigurationError(
            f"{requirement}, from 0 to {classes - 1} for {classes} outputs per sample, got {low} to {high}. Number the "
            f"classes from 0{hint}, or mark labels to ignore with {ignored}."
        )


def _with_fields(value: Any) -> str:
    named = as_mapping(value)
    return f"a {type(value).__name__}" + (f" of {', '.join(map(str, named))}" if named is not None else "")
