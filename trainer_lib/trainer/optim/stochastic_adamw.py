"""AdamW for weights in bfloat16, without copies in fp32: what is too small for a step is kept on average."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.optim.per_parameter import PerParameterOptimizer

_DROPPED = 16  # bits of a float32 that bfloat16 does not have


class StochasticAdamW(PerParameterOptimizer):
    """AdamW that computes in fp32 and rounds bfloat16 weights and moments stochastically.

    A value is rounded up or down with a probability that makes it right on average, so small updates are not lost.
    The random numbers follow from the number of the step and of the parameter: they are the same on all ranks, and
    after a resume. Weights in other types are not rounded.

    Args:
        params: Parameters, or groups.
        lr: The learning rate.
        betas: The decay rates of the moments.
        eps: The smallest divisor.
        weight_decay: The weight decay.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> StochasticAdamW([weight], lr=1.0, weight_decay=0.0).step()
        >>> weight.tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(f"betas must be at least 0 and below 1 (got {shown(betas)}).")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        # Shards are updated one by one, as AdamW treats each value alone.
        stored = [_local(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        weight, first, second = (tensor.float() for tensor in stored)
        assert parameter.grad is not None
        gradient, (beta1, beta2) = _local(parameter.grad).float(), group["betas"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias1, bias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(first, (second / bias2).sqrt_().add_(group["eps"]), value=-group["lr"] / bias1)
        generator = torch.Generator(weight.device).manual_seed(number + 1_000_003 * state["step"])
        for target, value in zip(stored, (weight, first, second), strict=True):
            if target.dtype is torch.bfloat16:
                target.copy_(round_stochastically(value, generator))
            elif target is not value:
                target.copy_(value)


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return fp32 values in bfloat16, rounded up or down at random so that they are right on average.

    Args:
        values: The values.
        generator: Where the random numbers come from.

    Example:
        >>> round_stochastically(torch.tensor([1.5, float("inf")])).tolist()
        [1.5, inf]
    """
    noise = torch.randint(1 << _DROPPED, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    rounded = ((values.view(torch.int32) + noise) >> _DROPPED << _DROPPED).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)
