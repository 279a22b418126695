"""`AcceleratedOptimizer`: an optimizer that steps once per accumulation window."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.errors import StateError
from trainer_lib.foundation.tensors.pytree import send_to_device
from trainer_lib.precision.base import FullPrecision
from trainer_lib.precision.scaler import ScaledAutocast
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.state.gradient_state import GradientState
from trainer_lib.strategies.clip_grad_norm import multiply

if TYPE_CHECKING:
    from trainer_lib.strategies.deepspeed.zero_optimizer import ZeroOptimizer

_ZERO_GRAD = Optimizer.zero_grad


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` act only at the end of an accumulation window.

    `Accelerator.prepare` creates it. State, parameter groups and all other attributes are the wrapped optimizer's.

    Args:
        optimizer: The optimizer to wrap.
        device_placement: Move its state to the device of its parameters.
        scaler: The loss scaler, if you give no `precision`.
        precision: Unscales gradients and steps.
        window: The accumulation window.
    """

    # Whether parameters are updated while the backward runs.
    updates_in_backward = False
    has_updated = False

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        *,
        precision: FullPrecision | None = None,
        window: GradientWindow | None = None,
    ) -> None:
        # Not super().__init__: the parameter groups are the wrapped optimizer's.
        self.optimizer = optimizer
        self.precision: FullPrecision | ScaledAutocast = precision or (
            FullPrecision() if scaler is None else ScaledAutocast.around(scaler)
        )
        self.window: GradientWindow = window or GradientWindow(GradientState())
        self.scaler: Any = self.precision.scaler
        self.device_placement = device_placement
        self._gradients_are_final = False
        self._backwards_at_step = self.window.backwards
        self._stepped_in = 0  # the micro-batch of the last call of step
        self._zeroes_first_in = 0  # the window that began with zero_grad before step
        self._last_mode: str | None = None
        if device_placement and optimizer.state:
            # torch's load_state_dict moves the state that belongs on the device.
            optimizer.load_state_dict(optimizer.state_dict())

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation, which says whether the current micro-batch updates."""
        return self.window.state

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The rank, the device and the precision."""
        return AcceleratorState()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` was skipped because a gradient overflowed (fp16)."""
        return self.precision.was_skipped(self.optimizer)

    @property
    def class_name(self) -> str:
        """The name of the class of the user's optimizer."""
        return type(self.optimizer).__name__

    @property
    def holds_gradients(self) -> bool:
        """Whether a backward ran since the last update."""
        return self._backwards_at_step != self.window.backwards

    @property
    def has_modes(self) -> bool:
        """Whether the wrapped optimizer has `train()` and `eval()` (schedule-free optimizers)."""
        return all(callable(getattr(self.optimizer, mode, None)) for mode in ("train", "eval"))

    @property
    def is_training(self) -> bool:
        """Whether the wrapped optimizer is in training mode; an optimizer without modes always is.

        Reads `train_mode` of the groups or the optimizer; if neither has it, the last call of `train` or `eval` counts.
        """
        if not self.has_modes:
            return True
        modes = [group["train_mode"] for group in self.param_groups if "train_mode" in group]
        return any(modes) if modes else bool(getattr(self.optimizer, "train_mode", self._last_mode == "train"))

    @property
    def has_stepped(self) -> bool:
        """Whether `step` was called in this micro-batch."""
        return self._stepped_in == self.window.micro_batch

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the weights if the window is complete."""
        self._stepped_in = self.window.micro_batch
        if not self.window.state.sync_gradients:
            return None
        if closure is not None:
            closure = functools.partial(self._after, closure)
        elif not self._gradients_are_final:
            self._apply_factor()
        result = self.precision.step(self.optimizer, closure)
        self._finish_round()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop the gradients, unless their window is unfinished."""
        window = self.window
        stepped = self._stepped_in == window.micro_batch
        holds_gradients = self._backwards_at_step != window.backwards  # inlined `holds_gradients`, for speed
        if window.micro_batches == 1 and not stepped:
            self._zeroes_first_in = window.began
        if not window.may_zero(stepped, self._zeroes_first_in == window.began, holds_gradients):
            return
        if self._gradients_are_final:
            self.precision.discard(self.optimizer)
        self._finish_round()
        if set_to_none is None:
            self._drop_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def restart_window(self) -> None:
        """Drop the gradients of the unfinished window, as if no backward had run."""
        if self._gradients_are_final:
            self.precision.discard(self.optimizer)
        self._finish_round()
        self._drop_gradients()

    def attach(self) -> None:
        """Follow the parameters that train now, after a model was prepared: nothing to do."""

    def detach(self) -> None:
        """Follow the parameters no longer: nothing to do."""

    def finalize_gradients(self) -> None:
        """Unscale the gradients and divide them by the weight of the window, once an update."""
        if not self._gradients_are_final:
            self._gradients_are_final = True
            self.precision.unscale(self.optimizer)
            self._apply_factor()

    def round_state(self) -> list[int]:
        """Return this optimizer's position in its window.

        Raises:
            StateError: If its gradients were clipped, but `step` was not called yet.
        """
        if self._gradients_are_final and self.holds_gradients:
            raise StateError(
                f"save_state was called between clipping and step() of {type(self.optimizer).__name__}. Call it after "
                "step()."
            )
        return [self._backwards_at_step, self._stepped_in, self._zeroes_first_in]

    def load_round_state(self, state: list[int]) -> None:
        """Load a position that `round_state` returned, and drop the gradients."""
        self.precision.discard(self.optimizer)
        self._gradients_are_final = False
        self.optimizer.zero_grad()
        self._backwards_at_step, self._stepped_in, self._zeroes_first_in = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer with modes (schedule-free) to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch an optimizer with modes (schedule-free) to evaluation."""
        self._switch("eval")

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the wrapped optimizer."""
        if name == "optimizer":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy: all but the window, and the `step` that a schedule has wrapped."""
        return {name: value for name, value in self.__dict__.items() if name not in ("window", "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes that `__getstate__` returned, with a new window."""
        self.__dict__.update(state, window=GradientWindow(GradientState()))

    def __repr__(self) -> str:
        """Return the wrapped optimizer's representation."""
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def _after(self, closure: Callable[[], Any]) -> Any:
        were_final, before = self._gradients_are_final, self.window.backwards
        self._gradients_are_final = False
        result = closure()
        if were_final and self.window.backwards == before:
            self._gradients_are_final = True
        if not self._gradients_are_final:  # the closure has not clipped them
            self._gradients_are_final = True
            self._apply_factor()
        return result

    def _apply_factor(self) -> None:
        if self._backwards_at_step == self.window.backwards:  # gradients of the last update, already divided
            return
        factor = self.window.factor(self)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            multiply(gradients, factor)

    def _finish_round(self) -> None:
        self._gradients_are_final = False
        self._backwards_at_step = self.window.backwards
        self.window.forget_weights(self)

    def _drop_gradients(self) -> None:
        optimizer = self.optimizer
        if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):  # overridden
            optimizer.zero_grad()
            return
        # torch's zero_grad does the same, plus a profiler record that takes longer than the work.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _switch(self, mode: str) -> None:
        if self.has_modes:
            getattr(self.optimizer, mode)()
            self._last_mode = mode


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer whose gradients ZeRO holds until an update needs them."""

    optimizer: "ZeroOptimizer"

    @property
    def class_name(self) -> str:
        """The name of the class of the user's optimizer."""
        return type(self.optimizer.optimizer).__name__

    def finalize_gradients(self) -> None:
        """Complete the gradients, unscale them, and divide them by the weight of the window, once an update."""
        if self.holds_gradients:
            self.optimizer.collect_gradients()
        super().finalize_gradients()

    def _apply_factor(self) -> None:
        if self.holds_gradients:
            self.optimizer.collect_gradients()
        super()._apply_factor()


def move_to_device(state: Any, device: Any) -> Any:
    """Return the state of an optimizer with its tensors on a device."""
    return send_to_device(state, device)
