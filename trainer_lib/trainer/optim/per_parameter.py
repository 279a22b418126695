"""The step of optimizers that update each parameter by itself, with torch's closure."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerParameterOptimizer(Optimizer):
    """An optimizer that updates its parameters one after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step."""
        loss = loss_of(closure)
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._step(parameter, group, number)
        return loss

    @abstractmethod
    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        """Update a parameter that has a gradient; `number` counts all parameters, from 1."""


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of a step returns, with gradients; `None` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
