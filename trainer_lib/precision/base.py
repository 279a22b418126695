"""`FullPrecision`: train in the type of the weights; the base class of all precisions."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _storage_Use_Count as _users_of_storage  # pyright: ignore[reportPrivateUsage]
from torch.autograd.graph import _engine_run_backward as _run_backward  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer
from torch.overrides import has_torch_function_unary

from trainer_lib.modules.forwards import unwrap_forward
from trainer_lib.options.precision_options import AutocastKwargs


class FullPrecision:
    """Forward, backward and step in the type of the weights; other precisions override what differs."""

    name = "no"
    scaler: Any = None
    fp8_backend: Any = None
    uses_autocast: bool = False
    unconverted: nn.Module | None = None  # the model whose 16-bit outputs stay so, while only its loss is used

    def check(self, model: nn.Module) -> None:
        """Raise if `model` cannot be trained in this precision."""

    def cast(self, model: nn.Module) -> None:
        """Cast the weights and buffers of a model to the type they are trained in, in place."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a forward computes."""
        del handler
        return nullcontext()

    def set_autocast(self, options: AutocastKwargs) -> None:
        """Replace the options of `autocast`, and of models that are wrapped from now on."""

    def wrap_forward(self, model: nn.Module) -> None:
        """Run the model's forward in the context of `autocast`, and convert its outputs to fp32."""
        unwrap_forward(model)  # an earlier Accelerator may have wrapped it

    def unwrap_forward(self, model: nn.Module) -> None:
        """Undo `wrap_forward`."""

    def begin_backward(self, begins_window: bool) -> None:
        """Prepare a backward, or all those of a window; `begins_window`: no gradients are pending from before."""
        del begins_window

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss whose gradients `unscale` divides."""
        return loss

    def backward(self, loss: Tensor, begins_window: bool, divisor: float = 1.0, **kwargs: Any) -> None:
        """Compute the gradients of `loss / divisor`; `begins_window`: no gradients are pending from before."""
        del begins_window
        differentiate(loss, divisor, kwargs)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale."""

    def discard(self, optimizer: Optimizer) -> None:
        """Reset the record that the gradients were unscaled, since they are discarded."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Update the weights, unless a gradient overflowed."""
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last `step` of the optimizer was skipped."""
        del optimizer
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this precision for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        del state


def differentiate(loss: Tensor, divisor: float, options: dict[str, Any]) -> None:
    """Compute the gradients of `loss / divisor`, without the two operations of a division.

    The gradient of the loss is given even where it is 1: torch would make a tensor of it each time. And it is given to
    autograd's engine itself: `Tensor.backward` would import sympy, for half a second, to compare two empty shapes.
    """
    if type(loss) is Tensor and not loss.ndim and not options and not has_torch_function_unary(loss):
        gradient, storage, users = _one_over(divisor, loss.dtype, loss.device)
        try:
            _run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        finally:
            if _users_of_storage(storage) > users:  # a parameter's gradient is a view of it, which may change
                _one_over.cache_clear()
    elif divisor == 1.0:
        loss.backward(**options)
    else:
        (loss / divisor).backward(**options)


@functools.lru_cache(maxsize=64)
def _one_over(divisor: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int, int]:
    """Return the gradient of a loss, the identity of its memory, and how many use that."""
    gradient = torch.full((), 1 / divisor, dtype=dtype, device=device)
    storage = gradient.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return gradient, storage, _users_of_storage(storage)
