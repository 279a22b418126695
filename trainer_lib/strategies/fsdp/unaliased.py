"""Outputs of sharded modules that may be changed in place."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.pytree import map_tensors, tensors


def unalias_outputs(module: nn.Module) -> None:
    """Let the forward of a module return no views; call it before `fully_shard`.

    A linear layer with bias returns a view, for example. After a change in place, such as `logits /= 2`, the backward
    would not gather the weights of the module, or not reduce their gradients.
    """
    module.register_forward_hook(_unalias)


def unaliased(value: Tensor) -> Tensor:
    """Return the same values as a tensor that is no view: FSDP2's hooks do not follow in-place changes of views."""
    if torch.compiler.is_compiling() or not value._is_view():  # in a graph nothing is a view
        return value
    return _Unaliased.apply(value)  # type: ignore[return-value]


def _unalias(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    del module, inputs
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    has_views = any(value.requires_grad and value._is_view() for value in tensors(outputs))
    return map_tensors(_unaliased_if_trained, outputs) if has_views else None


def _unaliased_if_trained(value: Tensor) -> Tensor:
    return unaliased(value) if value.requires_grad else value


class _Unaliased(torch.autograd.Function):
    """Returns the same values with memory of the same address, in a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return value.detach()  # shares the version too, so autograd finds changes of values that it needs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient
