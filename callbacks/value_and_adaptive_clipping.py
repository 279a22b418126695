"""Gradient clipping by value, and adaptively by the norm of the weights (AGC)."""

import math
from typing import Any, ClassVar

import torch

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.weights.patterns import matching


class ClipValue(Modifier):
    """Clamps each element of the gradients to the range from `-value` to `value`.

    The trainer then clips the norm, unless you set `TrainingArguments(max_grad_norm=None)`.

    Args:
        value: The limit.

    Example:
        >>> clip = ClipValue(0.5)
    """

    changes_weights: ClassVar[bool] = False

    def __init__(self, value: float) -> None:
        self.value: float = _positive("ClipValue(value)", value)

    def on_backward_end(self, run: Run) -> None:
        _check_gradients(run, "ClipValue", "self.accelerator.clip_grad_value_(parameters, value)")
        run.accelerator.strategy.clip_grad_value(run.trained_parameters, self.value)


class AdaptiveClipping(Modifier):
    """Scales the gradient of each unit (a row of a weight, or a whole vector) down to a share of the unit's norm.

    This is adaptive gradient clipping (AGC), used to train networks without normalization. The trainer then clips the
    norm, unless you set `TrainingArguments(max_grad_norm=None)`.

    Args:
        share: The largest allowed ratio of a gradient's norm to its unit's norm.
        least: The lower bound on a unit's norm, for units near 0 such as new biases.
        exclude: Patterns of the names of weights that are not clipped, such as ("head.*",).

    Example:
        >>> clip = AdaptiveClipping(0.01, exclude=("head.*",))
    """

    changes_weights: ClassVar[bool] = False

    def __init__(self, share: float = 0.01, least: float = 1e-3, exclude: tuple[str, ...] = ()) -> None:
        self.share: float = _positive("AdaptiveClipping(share)", share)
        self.least: float = _positive("AdaptiveClipping(least)", least)
        self.exclude: tuple[str, ...] = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._excluded: set[Any] = set()

    def on_fit_begin(self, run: Run) -> None:
        named = run.parameters
        self._excluded = {named[name] for name in matching(named, self.exclude, "AdaptiveClipping(exclude)")}

    @torch.no_grad()
    def on_backward_end(self, run: Run) -> None:
        _check_gradients(run, "AdaptiveClipping", "self.accelerator.clip_grad_norm_(parameters, max_norm)")
        for weight in run.trained_parameters:
            if weight.grad is not None and weight not in self._excluded:
                limit = _norms(weight).clamp(min=self.least) * self.share
                norms = _norms(weight.grad)
                # Gradients with a NaN or Inf norm stay unchanged, so that `on_nonfinite` detects them.
                weight.grad.mul_(torch.where(norms > limit, limit / norms, torch.ones_like(norms)))


def _check_gradients(run: Run, callback: str, instead: str) -> None:
    if any(optimizer.has_stepped for optimizer in run.optimizers.values()):
        raise ConfigurationError(
            f"{callback} clips gradients before the Trainer steps the optimizers, and your training_step steps them "
            f"itself. Leave {callback} out, and clip in training_step, before step(): {instead}."
        )


def _norms(tensor: Any) -> Any:
    over = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return torch.linalg.vector_norm(tensor, dim=over, keepdim=tensor.ndim > 1)


def _positive(option: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{option} must be a number above 0 (got {shown(value)}).")
    return value
