"""This file is gradients that are cut: by value, and by the size of the weights that they are to change."""

import math
from typing import Any

import torch

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.patterns import matching


class ClipValue(Modifier):
    """Cuts each number of the gradients to at most `value` in size.

    The norm is clipped after it, unless `TrainingArguments(max_grad_norm=None)`.

    Args:
        value: The limit.

    Example:
        >>> clip = ClipValue(0.5)
    """

    def __init__(self, value: float) -> None:
        self.value = _positive("ClipValue(value)", value)

    def on_backward_end(self, run: Run) -> None:
        run.accelerator.strategy.clip_grad_value(_trained(run), self.value)


class AdaptiveClipping(Modifier):
    """Shrinks the gradient of each unit (row of a weight, whole vector) to a share of the norm of the unit itself.

    Networks without normalization are trained so (AGC). The norm is clipped after it, unless
    `TrainingArguments(max_grad_norm=None)`.

    Args:
        share: The most that the norm of a gradient may be of that of its unit.
        least: The norm that smaller units, such as biases at 0, are taken to have.
        exclude: Which weights to leave alone, such as ("head.*",): patterns over their names.

    Example:
        >>> clip = AdaptiveClipping(0.01, exclude=("head.*",))
    """

    def __init__(self, share: float = 0.01, least: float = 1e-3, exclude: tuple[str, ...] = ()) -> None:
        self.share = _positive("AdaptiveClipping(share)", share)
        self.least = _positive("AdaptiveClipping(least)", least)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._spared: set[Any] = set()

    def on_fit_begin(self, run: Run) -> None:
        named = run.parameters
        self._spared = {named[name] for name in matching(named, self.exclude, "AdaptiveClipping(exclude)")}

    @torch.no_grad()
    def on_backward_end(self, run: Run) -> None:
        for weight in _trained(run):
            if weight.grad is not None and weight not in self._spared:
                limit = _norms(weight).clamp(min=self.least) * self.share
                norms = _norms(weight.grad)
                # A norm that is not finite stays as it is, for the guard to see.
                weight.grad.mul_(torch.where(norms > limit, limit / norms, torch.ones_like(norms)))


def _norms(tensor: Any) -> Any:
    over = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return torch.linalg.vector_norm(tensor, dim=over, keepdim=tensor.ndim > 1)


def _trained(run: Run) -> list[Any]:
    return [p for one in run.optimizers.values() for group in one.param_groups for p in group["params"]]


def _positive(told_as: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{told_as}: {shown(value)} must be a number above 0.")
    return value
