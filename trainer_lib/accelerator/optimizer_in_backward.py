"""`OptimizerInBackward`: updates each parameter in the backward, as soon as its gradient is complete, and frees it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, StateError, UnsupportedError
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.precision import FullPrecision
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import Strategy
from trainer_lib.strategies.clip_grad_norm import NormOfParts, multiply

_OPTION, _REMEDY = "optimizer_in_backward=True", "leave optimizer_in_backward out"


class OptimizerInBackward(AcceleratedOptimizer):
    """An optimizer that updates each parameter in the backward, as soon as its gradient is complete, and frees it.

    State, parameter groups and checkpoints are the wrapped optimizer's, and so are the numbers. `step` runs what
    follows an update: hooks, schedules, and parameters that got their gradient in another way. A gradient that is NaN
    or Inf changes nothing, and stays until `step`, for the error.

    Args:
        optimizer: The optimizer to wrap.
        device_placement: Move its state to the device of its parameters.
        precision: The precision.
        window: The accumulation window.
        strategy: The strategy, which completes gradients.
    """

    updates_in_backward = True

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool,
        *,
        precision: FullPrecision,
        window: GradientWindow,
        strategy: Strategy,
    ) -> None:
        super().__init__(optimizer, device_placement, precision=precision, window=window)
        # A name of an optimizer may ask for it too.
        self.option: str = getattr(optimizer, "option_of_updates", _OPTION)
        self.remedy: str = _REMEDY if self.option == _OPTION else "take another optimizer"
        if self.scaler is not None:
            raise UnsupportedError(
                f"{self.option} does not work with mixed_precision='fp16': its scaler decides on an update once all "
                f"gradients are known. Use mixed_precision='bf16', or {self.remedy}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(f"{self.option} does not work with LBFGS, which needs all gradients at once.")
        self._strategy = strategy
        self._hooks: list[Any] = []
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._groups_of: Any = None
        self._updated: dict[Tensor, bool] = {}  # since the last step; False: its gradient was not finite
        self._norm = NormOfParts(strategy.device)
        self._step_once = _inner_step(type(optimizer))
        self.attach()

    @property
    def has_updated(self) -> bool:
        """Whether parameters got their gradients since the last `step`."""
        return bool(self._updated)

    def attach(self) -> None:
        """Follow the gradients of the parameters that train now.

        Raises:
            UnsupportedError: If the strategy completes gradients later.
        """
        reason = self._strategy.why_gradients_are_late()
        if reason is not None:
            raise UnsupportedError(
                f"{self.option} updates parameters while the backward runs, and {reason}, or {self.remedy}."
            )
        self.detach()
        self._groups_of = None
        # torch keeps a parameter's hooks where the garbage collector does not look.
        update = partial(_call, WeakMethod(self._update))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(update))

    def detach(self) -> None:
        """Follow gradients no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        super().add_param_group(param_group)
        self._groups_of = None
        self.attach()

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop the gradients, unless their window is unfinished.

        Raises:
            StateError: If parameters were updated with them since the last `step`.
        """
        if any(self._updated.values()):
            raise StateError(
                f"zero_grad() drops gradients that {self.option} has already applied: a loss reached parameters of "
                f"{self.class_name}, which has not stepped since. Call step() after each backward. If the loss trains "
                "the parameters of another optimizer, freeze these (requires_grad_(False)) for that loss, or "
                f"{self.remedy}."
            )
        super().zero_grad(set_to_none)

    def finalize_gradients(self) -> None:
        """Raise: there are no gradients to clip or to look at.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"{self.option} frees each gradient in the backward, so that none is left to clip, unscale or look at: "
            f"leave out clipping (max_grad_norm=None) and callbacks that need gradients, or {self.remedy}."
        )

    def gradient_norm(self) -> Tensor:
        """Return the norm over the gradients of this update, which are gone. All ranks call it."""
        return self._norm.total()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy: not the hooks, which are those of this object's parameters."""
        return super().__getstate__() | {"_hooks": []}

    def _finish_round(self) -> None:
        super()._finish_round()
        self._updated.clear()
        self._norm.clear()

    def _apply_factor(self) -> None:
        for parameter in self._updated:  # what is left is not finite
            parameter.grad = None
        super()._apply_factor()

    def _update(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self._check_update(parameter)
        factor = self.window.factor(self)
        if isinstance(factor, Tensor) or factor != 1.0:
            multiply([gradient], factor)
        may_update = self._updated[parameter] = self._may_update(self._norm.add(gradient))
        if may_update:
            self._step_parameter(parameter)
            parameter.grad = None

    def _check_update(self, parameter: Tensor) -> None:
        if not self.window.state.sync_gradients:
            raise ConfigurationError(
                f"{self.option} keeps no gradients that micro-batches could add to "
                f"(gradient_accumulation_steps={self.window.state.num_steps}). Set gradient_accumulation_steps=1, with "
                f"larger batches, or {self.remedy}."
            )
        if parameter in self._updated:
            raise StateError(
                f"A parameter of shape {list(parameter.shape)} got a second gradient in one update, and {self.option} "
                "has updated it with the first. Call step() and zero_grad() after each backward, add up losses before "
                "it, and checkpoint activations with use_reentrant=False."
            )

    def _may_update(self, norm: Tensor) -> bool:
        """Whether a gradient is finite; a fused optimizer finds out on its device, so that nothing waits for it."""
        if norm.is_cpu or not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return math.isfinite(norm.item())
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        return True

    def _step_parameter(self, parameter: Tensor) -> None:
        optimizer = self.optimizer
        groups = optimizer.param_groups
        group = self._group_of(parameter)
        alone = {**group, "params": [parameter]}
        optimizer.param_groups = [alone]
        try:
            with torch.no_grad():
                self._step_once(optimizer)
        finally:
            optimizer.param_groups = groups
        changed = [name for name, value in alone.items() if name != "params" and value is not group.get(name)]
        if changed:
            raise UnsupportedError(
                f"{self.option} does not work with {self.class_name}, which changes {', '.join(changed)} of a whole "
                "parameter group in each step. Use an optimizer with a state for each parameter, such as AdamW or SGD."
            )

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        if self._groups_of is not groups:  # loading a state makes new ones
            self._groups = {held: group for group in groups for held in group["params"]}
            self._groups_of = groups
        return self._groups[parameter]


def norm_in_backward(optimizers: Sequence[AcceleratedOptimizer]) -> Tensor:
    """Return the norm over the gradients of one update of all these optimizers. All ranks call it."""
    norms = [optimizer.gradient_norm() for optimizer in optimizers if isinstance(optimizer, OptimizerInBackward)]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _inner_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of an optimizer without torch's hooks, which run once an update."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _call(update: "WeakMethod[Callable[[Tensor], None]]", parameter: Tensor) -> None:
    method = update()
    if method is not None:
        method(parameter)
