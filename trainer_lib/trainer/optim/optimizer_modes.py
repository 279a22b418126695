"""Training and evaluation modes of optimizers, such as schedule-free ones, which evaluate with averaged weights."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer_lib.events import Dispatcher, Run

if TYPE_CHECKING:
    from trainer_lib.optimizer import AcceleratedOptimizer


def train(optimizers: "Iterable[AcceleratedOptimizer]") -> None:
    """Switch optimizers to training mode, unless they are in it."""
    for optimizer in optimizers:
        if not optimizer.is_training:
            optimizer.train()


def evaluate(optimizers: "Iterable[AcceleratedOptimizer]") -> None:
    """Switch optimizers to evaluation mode permanently, unless they are in it."""
    for optimizer in _in_training(optimizers):
        optimizer.eval()


@contextmanager
def evaluating(optimizers: "Iterable[AcceleratedOptimizer]") -> Generator[None]:
    """Return a context in which optimizers are in evaluation mode; afterwards the weights are bitwise the same.

    Switching modes back and forth rounds the weights, so the training weights are copied and restored.
    """
    switched = _in_training(optimizers)
    parameters = [p for optimizer in switched for group in optimizer.param_groups for p in group["params"]]
    copies = [(parameter, _copy(parameter)) for parameter in parameters]
    try:
        evaluate(switched)
        yield
    finally:
        train(switched)
        _restore(copies)


@contextmanager
def weights_in_use(run: Run, events: Dispatcher) -> Generator[None]:
    """Return a context in which a model has the weights to save and export."""
    with evaluating(run.optimizers.values()), events.eval_weights(run):
        yield


def _in_training(optimizers: "Iterable[AcceleratedOptimizer]") -> "list[AcceleratedOptimizer]":
    return [optimizer for optimizer in optimizers if optimizer.has_modes and optimizer.is_training]


def _copy(parameter: Tensor) -> Tensor:
    from trainer_lib.strategies.clip_grad_norm import local_values

    (value,) = local_values([parameter])
    return value.detach().clone()


@torch.no_grad()
def _restore(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    from trainer_lib.strategies.clip_grad_norm import local_values

    for parameter, value in copies:
        local_values([parameter])[0].copy_(value)
