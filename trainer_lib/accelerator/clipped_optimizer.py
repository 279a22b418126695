"""`ClippedOptimizer`: an optimizer whose gradients are clipped before each update."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.strategies import Strategy


class ClippedOptimizer(AcceleratedOptimizer):
    """An optimizer whose gradients are clipped before each update, as `gradient_clipping` of a DeepSpeed config asks.

    Args:
        optimizer: The optimizer of the script.
        device_placement: Whether its state is moved to the device.
        strategy: Clips the gradients.
        max_norm: The largest norm of all gradients.
        **kwargs: Keywords of `AcceleratedOptimizer`.
    """

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, *, strategy: Strategy, max_norm: float, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, device_placement, **kwargs)
        self._strategy, self._max_norm = strategy, max_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip the gradients and update the weights if the window is complete."""
        if self.window.state.sync_gradients and self.holds_gradients:
            self.finalize_gradients()
            self.clip()
        return super().step(closure)

    def clip(self) -> Any:
        """Clip the gradients, and return their norm before."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return self._strategy.clip_grad_norm(parameters, self._max_norm, 2.0)
