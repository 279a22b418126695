"""fp16 with its loss scaler: scales losses, unscales gradients, and skips updates that overflow."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.precision_options import AutocastKwargs, GradScalerKwargs
from trainer_lib.precision.autocast import Autocast
from trainer_lib.precision.base import differentiate
from trainer_lib.state.partial_state import PartialState

_UNUSED = {"stage": OptState.READY}


class LossScaler(torch.amp.GradScaler):
    """Calls torch's scaler separately for each layout of gradients, since it does not take several at once.

    An optimizer whose gradients other ranks do not have, such as those of shards without a layout or of another stage,
    has a method `share_overflow` to agree with those ranks.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = self._unscale_layouts(optimizer, inv_scale, found_inf, allow_fp16)
        share = getattr(optimizer, "share_overflow", None)
        return flags if share is None else share(flags)

    def _unscale_layouts(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[Any, list[Tensor]] = {}  # by layout, in the same order on all ranks
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                spec: Any = getattr(parameter, "_spec", None)
                kinds.setdefault(None if spec is None else (spec.mesh, spec.placements), []).append(parameter)
        if len(kinds) < 2:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflows: dict[torch.device, Tensor] = {}
        for parameters in kinds.values():
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            flags = super()._unscale_grads_(part, inv_scale, found_inf.clone(), allow_fp16)
            for device, flag in flags.items():
                overflows[device] = torch.maximum(overflows[device], flag) if device in overflows else flag
        return overflows


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
        self._is_initialized = False
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

    def begin_backward(self, begins_window: bool) -> None:
        """Update the scale, but only while no optimizer holds gradients computed with the old scale."""
        if begins_window:
            self._update_scale()
            if not self._is_initialized:  # as the first loss would: a rank may compute none
                self._is_initialized = True
                self.scaler.scale(torch.zeros((), device=self.device_type))

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, begins_window: bool, divisor: float = 1.0, **kwargs: Any) -> None:
        """Compute scaled gradients."""
        self.begin_backward(begins_window)
        differentiate(self.scaler.scale(loss), divisor, kwargs)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once an update."""
        if self.scaler.is_enabled():
            self._begin_round(optimizer)
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
        self._begin_round(optimizer)
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

    def _begin_round(self, optimizer: Optimizer) -> None:
        """Let an optimizer step again before the scale is updated: another one still holds gradients of this scale."""
        # There is no public way: the scaler takes one step of each optimizer between two updates of the scale.
        states: dict[Any, Any] = self.scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
        if self._update_is_due and states.get(id(optimizer), _UNUSED)["stage"] is OptState.STEPPED:
            states[object()] = states.pop(id(optimizer))  # whether it overflowed counts for the update

    def _flags_of(self, optimizer: Optimizer) -> list[Tensor]:
        # There is no public way: step() returns None for a skipped and for a normal update.
        states = self.scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
        return list(states[id(optimizer)]["found_inf_per_device"].values())

    def _update_scale(self) -> None:
        if self._update_is_due:
            self._update_is_due = False
            self.scaler.update()


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for this rank's device, for loops that scale the loss of fp16 themselves.

    Args:
        distributed_type: Accepted for compatibility: one scaler is for all kinds of worlds.
        **kwargs: Arguments of `torch.amp.GradScaler`.
    """
    del distributed_type
    return LossScaler(PartialState().device.type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for sharded models; see `get_grad_scaler`."""
    return get_grad_scaler(**kwargs)
