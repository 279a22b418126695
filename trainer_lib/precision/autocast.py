"""Mixed precision by autocast."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer_lib.foundation.tensors.pytree import convert_to_fp32
from trainer_lib.modules import forwards
from trainer_lib.options.precision_options import AutocastKwargs
from trainer_lib.precision.base import FullPrecision
from trainer_lib.state.accelerator_state import AcceleratorState


class Autocast(FullPrecision):
    """Weights in fp32, computation in a 16-bit type where that is safe."""

    def __init__(self, name: str, dtype: torch.dtype, device_type: str, options: AutocastKwargs) -> None:
        self.name = name
        self.dtype = dtype
        self.device_type = device_type
        self.options: AutocastKwargs = options
        self.uses_autocast = True

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a `torch.autocast` context with the options of `handler`, or else of the `Accelerator`."""
        if not self.uses_autocast:
            return nullcontext()
        options = handler or self.options
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def set_autocast(self, options: AutocastKwargs) -> None:
        """Replace the options of `autocast`, and of models that are wrapped from now on."""
        self.options = options

    def wrap_forward(self, model: nn.Module) -> None:
        """Run the model's forward under autocast, and convert its outputs to fp32."""
        if self.uses_autocast:
            forwards.wrap_forward(model, functools.partial(_under, self, self.options))

    def unwrap_forward(self, model: nn.Module) -> None:
        """Restore the model's original forward."""
        forwards.unwrap_forward(model)


def _under(precision: Autocast, options: AutocastKwargs, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast(options):
            outputs = original(self, *args, **kwargs)
        return outputs if precision.unconverted is self else convert_to_fp32(outputs)

    return forward


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return an autocast context of the precision in `AcceleratorState`, for loops without an Accelerator.

    Args:
        native_amp: Whether to use autocast at all; otherwise the context does nothing.
        autocast_kwargs: The options of autocast.
    """
    state = AcceleratorState()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(state.mixed_precision)
    if not native_amp or dtype is None:
        return nullcontext()
    return Autocast(state.mixed_precision, dtype, state.device.type, autocast_kwargs or AutocastKwargs()).autocast()
