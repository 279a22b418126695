"""This file is whether a loss is one number, and whether outputs and targets are such as a loss compares."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib.foundation.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.losses.model_io import as_mapping
from trainer_lib.trainer.safety.error_context import described, kind

# By classes; a target is the number of one.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
# Value by value; torch would stretch one over the other.
_OF_VALUES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)


def check_loss(loss: Any, told_by: str) -> None:
    """Check that a loss is one number in a tensor.

    Args:
        loss: The loss.
        told_by: Who made it, for the error.

    Raises:
        ConfigurationError: If it is not.
    """
    if not isinstance(loss, Tensor):
        hint = " Give the tensor as it is, before .item() or float()." if isinstance(loss, (int, float)) else ""
        hint = hint or (" Is a return missing?" if loss is None else "")
        raise ConfigurationError(
            f"{told_by} returned a {type(loss).__name__} as the loss. Return a tensor of one number.{hint}"
        )
    if loss.ndim:
        raise ConfigurationError(
            f"{told_by} returned a loss of shape {tuple(loss.shape)}. Return one number: its mean, or "
            "LossResult(loss.sum(), weight=how many)."
        )
    if not loss.is_floating_point():
        raise ConfigurationError(f"{told_by} returned a loss of {kind(loss)}. Return a floating-point number.")


def check_weight(weight: Any, told_by: str) -> None:
    """Check that what a loss weighs is a number."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
        told = kind(weight) if isinstance(weight, Tensor) else repr(weight)
        raise ConfigurationError(f"{told_by} must be a number of items, 0 or more, got {told}.")


def check_result(result: Any) -> None:
    """Check what a `training_step` of a user returned.

    Raises:
        ConfigurationError: If it is no `LossResult` with a weight.
    """
    if not isinstance(result, LossResult):
        raise ConfigurationError(
            f"training_step returned a {type(result).__name__}. Return LossResult(loss_sum, weight=how many) after "
            "self.backward(loss_sum, weight), or None, and log for yourself."
        )
    check_weight(result.weight, "The weight of what training_step returned")


def no_gradients(has_own_step: bool) -> NoReturn:
    """Raise since what is trained got no gradients."""
    why = (
        "training_step has to call self.backward(loss)"
        if has_own_step
        else "the loss depends on none of the parameters that the optimizer has"
    )
    raise ConfigurationError(
        f"No parameter of the optimizer got a gradient, so nothing would be trained: {why}. Was the optimizer made "
        "from another model, or before this one was changed?"
    )


def _texts(targets: Any) -> list[str] | None:
    """Return the targets if they are texts."""
    rows: list[Any] = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    return rows if rows and all(isinstance(row, str) for row in rows) else None


def check_compared(function: Any, name: str, outputs: Any, targets: Any, ignored: int = IGNORE_INDEX) -> None:
    """Check what a loss of torch's is about to compare, once, as torch would not say or not in time.

    On an accelerator a target out of range ends the process without a word of which; and values of different shapes
    are stretched over each other.

    Args:
        function: The loss: its function, or an object.
        name: What it is called.
        outputs: What the model returned.
        targets: What the batch has.
        ignored: The target that does not count.

    Raises:
        ConfigurationError: If they cannot be compared.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        if (texts := _texts(targets)) is not None:
            raise ConfigurationError(
                f"loss_fn {name} compares numbers, and the targets are texts, such as {shown(texts[0])}. Give each "
                "class a number in the dataset: names = sorted(set(labels)); "
                "targets = [names.index(label) for label in labels]."
            )
        odd, what = (outputs, "the model returned") if not isinstance(outputs, Tensor) else (targets, "the targets are")
        raise ConfigurationError(
            f"loss_fn {name} compares tensors, and {what} {_named(odd)}. Return the predictions as a tensor (or as "
            "`logits` of several values), or override compute_loss(model, batch)."
        )
    function = type(function) if isinstance(function, nn.Module) else function
    if function in _OF_VALUES and outputs.shape != targets.shape:
        hint = ""
        if outputs.numel() == targets.numel():
            hint = " Give the targets that shape, such as targets[:, None], or squeeze the model's outputs."
        raise ConfigurationError(
            f"loss_fn {name} compares value by value; the outputs are {tuple(outputs.shape)} and the targets "
            f"{tuple(targets.shape)}.{hint}"
        )
    if function in _OF_CLASSES:
        _check_classes(name, outputs, targets, ignored)


def explained(error: Exception, name: str, outputs: Any, targets: Any) -> ConfigurationError:
    """Return an error of a loss of torch's in words that say what was compared."""
    return ConfigurationError(
        f"loss_fn {name} cannot compare outputs {described(outputs)} with targets {described(targets)}: {error}"
    )


def _check_classes(name: str, outputs: Tensor, targets: Tensor, ignored: int) -> None:
    is_of_probabilities = targets.is_floating_point() and targets.shape == outputs.shape
    if is_of_probabilities:
        return
    told = f"loss_fn {name} takes the numbers of classes as targets"
    if targets.dtype not in (torch.int64, torch.uint8):
        raise ConfigurationError(
            f"{told}, as int64, and these are {kind(targets)}. Give them as targets.long(); for values instead of "
            "classes take torch.nn.functional.mse_loss."
        )
    wanted = (outputs.shape[0], *outputs.shape[2:]) if outputs.ndim > 1 else ()
    if targets.shape != wanted:
        hint = " Classes come second: (samples, classes, …)." if outputs.ndim > 2 else ""
        if targets.numel() == outputs.numel() // max(1, outputs.shape[-1]):
            hint = hint or f" Give targets.reshape({', '.join(map(str, wanted)) or '()'})."
        raise ConfigurationError(
            f"{told}: for outputs of {tuple(outputs.shape)} they have the shape {wanted}, and here "
            f"{tuple(targets.shape)}.{hint}"
        )
    classes = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    counted = targets[targets != ignored]
    if not counted.numel():
        return
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        more = f", give the model {high + 1} outputs" if high >= classes else ""
        raise ConfigurationError(
            f"{told}, from 0 to {classes - 1} for {classes} outputs a sample, and this batch has {low} to {high}. "
            f"Number the classes from 0{more}, or ignore labels by {ignored}."
        )


def _named(value: Any) -> str:
    named = as_mapping(value)
    return f"a {type(value).__name__}" + (f" of {', '.join(map(str, named))}" if named is not None else "")
