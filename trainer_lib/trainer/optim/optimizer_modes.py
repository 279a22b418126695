"""Training and evaluation modes of optimizers that have them: schedule-free ones evaluate with averaged weights."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.strategies.grad_norm import local_values

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


def train(optimizers: Iterable[AcceleratedOptimizer]) -> None:
    """Switch optimizers to training, unless they are in that mode."""
    for optimizer in optimizers:
        if not optimizer.is_training:
            optimizer.train()


def evaluate(optimizers: Iterable[AcceleratedOptimizer]) -> None:
    """Switch optimizers to evaluation for good, unless they are in that mode."""
    for optimizer in _in_training(optimizers):
        optimizer.eval()


@contextmanager
def evaluating(optimizers: Iterable[AcceleratedOptimizer]) -> Generator[None]:
    """Return the context in which optimizers are in evaluation mode; afterwards the weights are the same to the bit.

    The way from one mode to the other and back rounds, so the weights of training are kept and put back.
    """
    switched = _in_training(optimizers)
    kept = [(p, _copy(p)) for optimizer in switched for group in optimizer.param_groups for p in group["params"]]
    try:
        evaluate(switched)
        yield
    finally:
        train(switched)
        _put_back(kept)


@contextmanager
def weights_in_use(trainer: "Trainer") -> Generator[None]:
    """Return the context in which a model has the weights that it is saved and exported with."""
    with evaluating(trainer.run.optimizers.values()), trainer.events.eval_weights(trainer.run):
        yield


def _in_training(optimizers: Iterable[AcceleratedOptimizer]) -> list[AcceleratedOptimizer]:
    return [optimizer for optimizer in optimizers if optimizer.has_modes and optimizer.is_training]


def _copy(parameter: Tensor) -> Tensor:
    (value,) = local_values([parameter])
    return value.detach().clone()


@torch.no_grad()
def _put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in kept:
        local_values([parameter])[0].copy_(value)
