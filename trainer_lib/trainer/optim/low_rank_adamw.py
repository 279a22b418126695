"""GaLore and APOLLO: AdamW whose states for hidden matrices have few rows or columns."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.trainer.optim.hidden_matrices import HIDDEN, marked_groups
from trainer_lib.trainer.optim.per_parameter import PerParameterOptimizer

_GROWTH = 1.01  # by which APOLLO's updates grow from step to step, at most


class LowRankAdamW(PerParameterOptimizer):
    """AdamW that computes its moments for hidden matrices from gradients projected to a low rank.

    Args:
        params: Parameters, or groups; a group says by `hidden_matrices` whether its gradients are projected.
        options: Learning rate, weight decay, betas, eps, and the options of the projection.
    """

    def __init__(self, params: Iterable[Any], options: dict[str, Any]) -> None:
        for name in ("rank", "update_proj_gap"):
            if isinstance(options[name], bool) or not isinstance(options[name], int) or options[name] < 1:
                raise ConfigurationError(f"{name} must be a whole number of at least 1 (got {shown(options[name])}).")
        super().__init__(marked_groups(params), {**options, "betas": tuple(options["betas"])})

    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        done = int(state.get("step", 0))
        if group[HIDDEN]:
            if hasattr(parameter, "_local_tensor"):
                raise UnsupportedError(
                    f"{type(self).__name__} projects whole gradients, and this model's weights are sharded. Use DDP, "
                    'or another optimizer, such as "adamw".'
                )
            if done % group["update_proj_gap"] == 0:
                state["projection"] = self._projection(gradient, group, number, done)
            moved = self._update(gradient, state["projection"], state, group)
        else:
            moved = _adam(gradient, state, group)
        parameter.add_(moved, alpha=-group["lr"])
        if group["weight_decay"] > 0.0:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])

    def _projection(self, gradient: Tensor, group: dict[str, Any], number: int, step: int) -> Tensor:
        raise NotImplementedError

    def _update(self, gradient: Tensor, projection: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class GaLoreAdamW(LowRankAdamW):
    """AdamW in the space of the largest singular vectors of each matrix's gradient (GaLore).

    Args:
        params: Parameters, or groups; see `LowRankAdamW`.
        lr: The learning rate.
        weight_decay: The weight decay.
        betas: The decay rates of the moments.
        eps: The smallest divisor.
        rank: The rows or columns that are left of a gradient.
        update_proj_gap: The steps between two computations of the singular vectors.
        scale: The factor of the updates of matrices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "rank": rank,
                "update_proj_gap": update_proj_gap, "scale": scale,
            },
        )  # fmt: skip

    def _projection(self, gradient: Tensor, group: dict[str, Any], number: int, step: int) -> Tensor:
        left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
        kept = right[: group["rank"]] if _is_tall(gradient) else left[:, : group["rank"]]
        return kept.to(gradient.dtype).contiguous()

    def _update(self, gradient: Tensor, projection: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        moved = _adam(_projected(gradient, projection), state, group)
        whole = moved @ projection if _is_tall(gradient) else projection @ moved
        return whole * group["scale"]


class APOLLOAdamW(LowRankAdamW):
    """SGD whose rates are those of AdamW on randomly projected gradients, for each channel or matrix (APOLLO).

    Args:
        params: Parameters, or groups; see `LowRankAdamW`.
        lr: The learning rate.
        weight_decay: The weight decay.
        betas: The decay rates of the moments.
        eps: The smallest divisor.
        rank: The rows or columns that are left of a gradient; 1 with `scale_type="tensor"` and a large `scale`.
        update_proj_gap: The steps between two random projections.
        scale: The square of the factor of the updates of matrices.
        scale_type: "channel" for a rate for each row or column, or "tensor" for one for each matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
    ) -> None:
        if scale_type not in ("channel", "tensor"):
            raise ConfigurationError(unknown("scale_type", scale_type, ["channel", "tensor"]))
        super().__init__(
            params,
            {
                "lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "rank": rank,
                "update_proj_gap": update_proj_gap, "scale": scale, "scale_type": scale_type,
            },
        )  # fmt: skip

    def _projection(self, gradient: Tensor, group: dict[str, Any], number: int, step: int) -> Tensor:
        # From the position and the step alone, so that all ranks and resumed runs have the same.
        generator = torch.Generator(gradient.device).manual_seed(number + 1_000_003 * step)
        rank, (rows, columns) = group["rank"], gradient.shape
        shape = (rank, columns) if _is_tall(gradient) else (rows, rank)
        drawn = torch.randn(shape, generator=generator, device=gradient.device) / math.sqrt(rank)
        return drawn.to(gradient.dtype)

    def _update(self, gradient: Tensor, projection: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        low = _projected(gradient, projection)
        moved = _adam(low, state, group, corrected=False)
        if group["scale_type"] == "tensor":
            rates = moved.norm() / (low.norm() + 1e-8)
        else:
            axis = 1 if _is_tall(gradient) else 0
            rates = moved.norm(dim=axis, keepdim=True) / (low.norm(dim=axis, keepdim=True) + 1e-8)
        scaled = gradient * rates
        norm = scaled.norm()
        if "update_norm" in state:  # a jump of the norm would undo much of what was learned
            limit = (norm / (state["update_norm"] + 1e-8)).clamp(min=_GROWTH) / _GROWTH
            scaled, norm = scaled / limit, norm / limit
        state["update_norm"] = norm
        return scaled * (math.sqrt(group["scale"]) * _correction(state, group))


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] >= matrix.shape[1]


def _projected(gradient: Tensor, projection: Tensor) -> Tensor:
    return gradient @ projection.T if _is_tall(gradient) else projection.T @ gradient


def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], *, corrected: bool = True) -> Tensor:
    """Update the moments, and return the direction of Adam, with the bias corrected or not."""
    if "exp_avg" not in state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    direction = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
    return direction * _correction(state, group) if corrected else direction


def _correction(state: dict[str, Any], group: dict[str, Any]) -> float:
    beta1, beta2 = group["betas"]
    return math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
