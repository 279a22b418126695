"""This file is full precision, and with it what every precision can be asked to do."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.options.precision_options import AutocastKwargs


class FullPrecision:
    """Forward, backward and step in the type of the weights; other precisions state what they do differently."""

    name = "no"
    scaler: Any = None

    def check(self, model: nn.Module) -> None:
        """Raise if `model` cannot be trained in this precision."""

    def cast(self, model: nn.Module) -> None:
        """Give the weights and buffers of a model the type that they are trained in, in place."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context for the arithmetic of a forward."""
        del handler
        return nullcontext()

    def wrap_forward(self, model: nn.Module) -> None:
        """Let the model's own forward run in the context of `autocast`, and return fp32."""

    def unwrap_forward(self, model: nn.Module) -> None:
        """Undo `wrap_forward`."""

    def backward(self, loss: Tensor, begins_window: bool, divisor: float = 1.0, **kwargs: Any) -> None:
        """Compute the gradients of `loss / divisor`; `begins_window` says that none are pending from before."""
        del begins_window
        differentiate(loss, divisor, kwargs)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true scale."""

    def discard(self, optimizer: Optimizer) -> None:
        """Forget that the gradients are at their true scale: they are thrown away."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Update the weights, if the gradients allow it."""
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last `step` of the optimizer left the weights alone."""
        del optimizer
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what this precision has learned, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        del state


def differentiate(loss: Tensor, divisor: float, options: dict[str, Any]) -> None:
    """Compute the gradients of `loss / divisor`, without the two operations that dividing is."""
    if divisor == 1.0:
        loss.backward(**options)
    elif type(loss) is Tensor and not loss.ndim and "gradient" not in options:
        loss.backward(_one_over(divisor, loss.dtype, loss.device), **options)
    else:
        (loss / divisor).backward(**options)


@functools.lru_cache(maxsize=64)
def _one_over(divisor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), 1 / divisor, dtype=dtype, device=device)
