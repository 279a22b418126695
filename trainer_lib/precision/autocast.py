"""Mixed precision by autocast: bf16, and fp16 with its loss scaler."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.pytree import convert_to_fp32
from trainer_lib.modules import forwards
from trainer_lib.options.precision_options import AutocastKwargs, GradScalerKwargs
from trainer_lib.precision.base import FullPrecision, differentiate
from trainer_lib.precision.scaler import LossScaler
from trainer_lib.state.accelerator_state import AcceleratorState


class Autocast(FullPrecision):
    """Weights in fp32, computation in a 16-bit type where that is safe."""

    def __init__(self, name: str, dtype: torch.dtype, device_type: str, options: AutocastKwargs) -> None:
        self.name = name
        self.dtype = dtype
        self.device_type = device_type
        self.options = options

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a `torch.autocast` context with the options of `handler`, or else of the `Accelerator`."""
        options = handler or self.options
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def wrap_forward(self, model: nn.Module) -> None:
        """Run the model's forward under autocast, and convert its outputs to fp32."""
        forwards.wrap_forward(model, functools.partial(_under, self))

    def unwrap_forward(self, model: nn.Module) -> None:
        """Restore the model's original forward."""
        forwards.unwrap_forward(model)


class ScaledAutocast(Autocast):
    """fp16: scales the loss so that small gradients do not underflow, and skips updates that overflow."""

    def __init__(self, device_type: str, options: AutocastKwargs, scaler_options: GradScalerKwargs) -> None:
        super().__init__("fp16", torch.float16, device_type, options)
        if device_type == "cpu" and not scaler_options.enabled:
            raise ConfigurationError(
                "GradScalerKwargs(enabled=False) does not work with fp16 on the CPU: small gradients would underflow. "
                "Leave the scaler on, or use mixed_precision='bf16'."
            )
        self.scaler: torch.amp.GradScaler = LossScaler(device_type, **scaler_options.to_dict())
        self._update_is_due = False
        # For each optimizer that stepped: the flags, on the device, of whether it overflowed.
        self._overflow_flags: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()

    @classmethod
    def around(cls, scaler: torch.amp.GradScaler) -> "ScaledAutocast":
        """Return an fp16 precision that uses an existing scaler."""
        # A scaler has no public attribute for its device.
        precision = cls(scaler._device, AutocastKwargs(), GradScalerKwargs())  # pyright: ignore[reportPrivateUsage]
        precision.scaler = scaler
        return precision

    def check(self, model: nn.Module) -> None:
        """Raise for trainable weights in fp16, whose gradients cannot be unscaled."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise ConfigurationError(
                    f"{name} is a trainable fp16 weight, and mixed_precision='fp16' needs fp32 weights. "
                    "Load the model in fp32 (model.float()), or freeze its fp16 weights."
                )

    def backward(self, loss: Tensor, begins_window: bool, divisor: float = 1.0, **kwargs: Any) -> None:
        """Compute scaled gradients."""
        # Update the scale only while no optimizer holds gradients computed with the old scale.
        if begins_window:
            self._update_scale()
        differentiate(self.scaler.scale(loss), divisor, kwargs)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once an update."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)

    def discard(self, optimizer: Optimizer) -> None:
        """Reset the record that the gradients were unscaled."""
        # There is no public way: the scaler resets it only in an update, and a discarded window makes none.
        self.scaler._per_optimizer_states.pop(id(optimizer), None)  # pyright: ignore[reportPrivateUsage]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Update the weights unless a gradient overflowed."""
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) does not work with fp16: the scaler must check the gradients after the "
                "closure. Use mixed_precision='bf16' or 'no'."
            )
        result = self.scaler.step(optimizer)
        if self.scaler.is_enabled():
            self._overflow_flags[optimizer] = self._flags_of(optimizer)
            self._update_is_due = True
        return result

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step overflowed; waits for the device if the optimizer skips steps on the device."""
        return any(flag.item() for flag in self._overflow_flags.get(optimizer, ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its history."""
        self._update_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale and its history."""
        self._update_is_due = False
        self.scaler.load_state_dict(state)

    def _flags_of(self, optimizer: Optimizer) -> list[Tensor]:
        # There is no public way: step() returns None for a skipped and for a normal update.
        states = self.scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
        return list(states[id(optimizer)]["found_inf_per_device"].values())

    def _update_scale(self) -> None:
        if self._update_is_due:
            self._update_is_due = False
            self.scaler.update()


def _under(precision: Autocast, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            outputs = original(self, *args, **kwargs)
        return convert_to_fp32(outputs)

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
