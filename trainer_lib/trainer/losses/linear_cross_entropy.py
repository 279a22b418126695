"""Cross-entropy of a linear layer's outputs, computed some rows at a time, so that they are never whole in memory."""

from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX


def linear_cross_entropy(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int = 512
) -> Tensor:
    """Return the sum of the cross-entropies of `inputs @ weight.T + bias`; targets of -100 count nothing.

    Gradients are computed in the same pass, for each part of the outputs while it is there.

    Args:
        inputs: The inputs of the layer, in rows.
        weight: Its weight.
        bias: Its bias.
        targets: The class of each row.
        rows: How many rows are computed at a time.

    Example:
        >>> inputs, weight = torch.randn(6, 4), torch.randn(9, 4)
        >>> loss = linear_cross_entropy(inputs, weight, None, torch.arange(6), rows=2)
        >>> whole = torch.nn.functional.cross_entropy(inputs @ weight.T, torch.arange(6), reduction="sum")
        >>> torch.allclose(loss, whole)
        True
    """
    return _LinearCrossEntropy.apply(inputs, weight, bias, targets, rows)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int) -> Tensor:
        needed = ctx.needs_input_grad
        of_inputs = torch.empty_like(inputs) if needed[0] else None
        of_weight = torch.zeros_like(weight) if needed[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
        total = torch.zeros((), dtype=torch.float32, device=inputs.device)
        for begin in range(0, len(inputs), rows):
            part = inputs[begin : begin + rows]
            loss, of_logits = _part(torch.nn.functional.linear(part, weight, bias), targets[begin : begin + rows])
            total += loss
            if of_inputs is not None:
                of_inputs[begin : begin + rows] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ part
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0)
        ctx.gradients = of_inputs, of_weight, of_bias
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        (factor,) = outer
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("The gradients of linear_cross_entropy were released by the first backward.")
        scaled = [None if gradient is None else gradient.mul_(factor.to(gradient.dtype)) for gradient in gradients]
        return *scaled, None, None


def _part(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some rows, and its gradient by their logits, in the type of the logits."""
    kind, logits = logits.dtype, logits.float()
    counts = targets != IGNORE_INDEX
    classes = torch.where(counts, targets, 0).unsqueeze(1)
    normalizers = logits.logsumexp(dim=1, keepdim=True)
    losses = (normalizers - logits.gather(1, classes)).squeeze(1)
    gradient = logits.sub_(normalizers).exp_() if kind is not torch.float32 else (logits - normalizers).exp_()
    gradient.scatter_add_(1, classes, -torch.ones_like(normalizers))
    gradient.mul_(counts.unsqueeze(1))
    return torch.where(counts, losses, 0.0).sum(), gradient.to(kind)
