"""Experts over ranks: each rank computes its experts for all tokens of a batch, and the outputs are added up."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_INPUTS = 3  # hidden states, the indices of each token's experts, their weights
_SKIPS_FOREIGN = "_is_expert_parallel"  # of the experts of transformers, from 5.18 on


def count_of(module: nn.Module) -> int | None:
    """Return how many experts a module computes; `None` if it is no module of experts.

    Such a module has stacked weights, one row of each for an expert, and takes hidden states, the indices of each
    token's experts and their weights: the experts of transformers' models.
    """
    count = getattr(module, "num_experts", None)
    weights = list(module.parameters(recurse=False))
    is_stacked = bool(weights) and all(weight.dim() > 1 and weight.shape[0] == count for weight in weights)
    return count if is_stacked and len(inspect.signature(module.forward).parameters) == _INPUTS else None


def install(module: nn.Module, mesh: "DeviceMesh") -> None:
    """Have a module compute this rank's experts, in hooks around its forward."""
    experts = _Experts(module, mesh)
    module.register_forward_pre_hook(experts.enter, with_kwargs=True)
    module.register_forward_hook(experts.leave, always_call=True)


class _Experts:
    """Replaces weights and indices by this rank's for a forward, and adds up the outputs of all ranks."""

    def __init__(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        self._group = mesh.get_group()
        self._names = list(inspect.signature(module.forward).parameters)
        self._all = int(module.num_experts)  # type: ignore[arg-type]
        self._count = self._all // mesh.size()
        self._first = self._count * mesh.get_local_rank()
        # The experts of transformers skip the index after the last one; others compute an expert, which counts nothing.
        self._index_of_foreign = self._count if hasattr(module, _SKIPS_FOREIGN) else 0
        self._whole: list[dict[str, Any]] = []
        self._anchors: list[Tensor] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Choose this rank's experts. A forward pre-hook."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        hidden, indices, weights = (given[name] for name in self._names)
        parts = {name: part.to_local() for name, part in module.named_parameters(recurse=False)}  # type: ignore[operator]
        entered = _Enter.apply(self._group, hidden, weights, *parts.values())
        hidden, weights, anchor, *local = entered  # type: ignore[misc]
        mine = indices - self._first
        is_foreign = (mine < 0) | (mine >= self._count)
        self._anchors.append(anchor)
        self._whole.append(dict(module._parameters))  # pyright: ignore[reportPrivateUsage]
        self._use(module, dict(zip(parts, local, strict=True)), self._count, is_parallel=True)
        indices = mine.masked_fill(is_foreign, self._index_of_foreign)
        return (hidden, indices, weights.masked_fill(is_foreign, 0.0)), {}

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Add up the outputs, and give the module its weights back, after an error too. A forward hook."""
        del args
        if not self._whole:  # the pre-hook raised
            return None
        self._use(module, self._whole.pop(), self._all, is_parallel=False)
        anchor = self._anchors.pop()
        return _Leave.apply(self._group, output, anchor) if isinstance(output, Tensor) else None

    def _use(self, module: Any, weights: dict[str, Any], count: int, *, is_parallel: bool) -> None:
        module._parameters.update(weights)
        module.num_experts = count
        if hasattr(module, _SKIPS_FOREIGN):
            setattr(module, _SKIPS_FOREIGN, is_parallel)


class _Enter(torch.autograd.Function):
    """Returns its inputs; the backward adds up the gradients of what all ranks hold.

    It runs on all ranks together, since the output depends on it by the anchor, even if no token has an expert here.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, group: Any, hidden: Tensor, weights: Tensor, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        anchor = hidden.new_zeros(())
        return hidden.view_as(hidden), weights.view_as(weights), anchor, *(part.view_as(part) for part in parts)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, of_hidden: Tensor, of_weights: Tensor, of_anchor: Tensor, *of_parts: Tensor
    ) -> tuple[Any, ...]:
        del of_anchor
        for index, gradient in enumerate((of_hidden, of_weights)):
            if ctx.needs_input_grad[index + 1]:
                dist.all_reduce(gradient, group=ctx.group)
        return None, of_hidden, of_weights, *of_parts


class _Leave(torch.autograd.Function):
    """Adds up the outputs of all ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, output: Tensor, anchor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.anchor = anchor.new_zeros(())
        total = output.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient, ctx.anchor
