"""LOMO and AdaLomo: optimizers with little or no state, made to update each weight as soon as its gradient is there."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.optim.per_parameter import PerParameterOptimizer


class _Fp32Updates(PerParameterOptimizer):
    """An optimizer that computes the update of each parameter in fp32.

    Attributes:
        option_of_updates: The option that asks for updates in the backward, for errors.
    """

    option_of_updates: str

    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        assert parameter.grad is not None
        limit, gradient, weight = group["clip_grad_value"], parameter.grad.float(), parameter.detach().float()
        gradient = gradient if limit is None else gradient.clamp(-limit, limit)
        self._update(weight, gradient, group, self.state[parameter])
        if weight.dtype != parameter.dtype:
            parameter.copy_(weight)

    @abstractmethod
    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Change an fp32 weight in place."""


class Lomo(_Fp32Updates):
    """LOMO (low-memory optimization): gradient descent without a state.

    Args:
        params: Parameters, or groups.
        lr: The learning rate.
        clip_grad_value: The largest absolute value of a gradient; `None`: no limit.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([1.0, 3.0])
        >>> Lomo([weight], lr=0.5, clip_grad_value=1.0).step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    option_of_updates = "optimizer='lomo'"

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, clip_grad_value: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "clip_grad_value": _limit(clip_grad_value)})

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        weight.add_(gradient, alpha=-group["lr"])


class AdaLomo(_Fp32Updates):
    """LOMO with an adaptive learning rate: a factored second moment, and updates normalized for each weight matrix.

    Args:
        params: Parameters, or groups.
        lr: The learning rate, relative to the root mean square of a weight.
        eps: What is added to squared gradients, and the smallest root mean square of a weight.
        clip_threshold: The largest root mean square of an update.
        decay_rate: The exponent of the step in the decay of the second moment.
        weight_decay: The weight decay.
        clip_grad_value: The largest absolute value of a gradient; `None`: no limit.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> weight.grad = torch.ones_like(weight)
        >>> AdaLomo([weight], lr=0.5).step()
        >>> weight.tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    option_of_updates = "optimizer='adalomo'"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
        clip_grad_value: float | None = None,
    ) -> None:
        if decay_rate >= 0:
            raise ConfigurationError(f"decay_rate must be below 0 (got {shown(decay_rate)}), such as -0.8.")
        defaults = {
            "lr": lr, "eps": tuple(eps), "clip_threshold": clip_threshold, "decay_rate": decay_rate,
            "weight_decay": weight_decay, "clip_grad_value": _limit(clip_grad_value),
        }  # fmt: skip
        super().__init__(params, defaults)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        smallest_square, smallest_scale = group["eps"]
        state["step"] = state.get("step", 0) + 1
        weight_of_old = 1.0 - state["step"] ** group["decay_rate"]
        squares = gradient.square() + smallest_square
        if weight.ndim > 1:
            rows = _moved(state, "exp_avg_sq_row", squares.mean(-1), weight_of_old)
            columns = _moved(state, "exp_avg_sq_col", squares.mean(-2), weight_of_old)
            of_rows = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = of_rows * columns.rsqrt().unsqueeze(-2) * gradient
        else:
            update = _moved(state, "exp_avg_sq", squares, weight_of_old).rsqrt() * gradient
        update = update / (_root_mean_square(update) / group["clip_threshold"]).clamp(min=1.0)
        rate = group["lr"] * _root_mean_square(weight).clamp(min=smallest_scale)
        weight.mul_(1.0 - rate * group["weight_decay"]).sub_(rate * update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its moments stay in fp32, where torch would cast them to the type of the weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, number in zip(parameters, saved, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)


def _moved(state: dict[str, Any], name: str, values: Tensor, weight_of_old: float) -> Tensor:
    """Return a moving average."""
    old, values = state.get(name), _reduced(values)
    state[name] = values if old is None else old.lerp_(values, 1.0 - weight_of_old)
    return state[name]


def _reduced(values: Any) -> Tensor:
    """Return a mean over the shards of all ranks on each of them; another tensor as it is."""
    placements = getattr(values, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return values
    from torch.distributed.tensor import Replicate

    return values.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in placements]
    )


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _limit(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ConfigurationError(f"clip_grad_value must be above 0, or None (got {shown(value)}).")
    return value
