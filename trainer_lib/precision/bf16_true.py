"""Training in bfloat16 throughout: weights, gradients and the optimizer's state, without autocast."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.pytree import convert_to_fp32, map_tensors
from trainer_lib.modules import forwards
from trainer_lib.precision.autocast import Autocast


class TrueBfloat16(Autocast):
    """Weights and arithmetic in bfloat16; a prepared model takes any floating inputs and returns fp32.

    `autocast` is for what a script computes beside the prepared model.
    """

    def cast(self, model: nn.Module) -> None:
        """Cast the floating parameters and buffers to bfloat16; each stays the object that optimizers know."""
        # Unlike bfloat16(), this casts lazy modules too.
        model._apply(_as_bfloat16)  # pyright: ignore[reportPrivateUsage]

    def wrap_forward(self, model: nn.Module) -> None:
        """Let the model's own forward take its floating inputs in bfloat16 and return fp32."""
        forwards.wrap_forward(model, functools.partial(_in_bfloat16, self))


def _in_bfloat16(precision: TrueBfloat16, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_as_bfloat16, (args, kwargs))
        outputs = original(self, *args, **kwargs)
        return outputs if precision.unconverted is self else convert_to_fp32(outputs)

    return forward


def _as_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point else tensor
