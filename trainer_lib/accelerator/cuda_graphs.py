"""Gradients that accumulate over several backwards, each of which replays the same CUDA graph."""

from collections.abc import Iterable

from torch.optim import Optimizer


def keep_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Copy gradients out of the graph's memory, before its next run overwrites them.

    The gradients of the following backwards are added to the copies in place.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
