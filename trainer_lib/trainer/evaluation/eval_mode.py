"""Evaluation mode: afterwards modules, optimizers, random generators and the run's batch are as they were before."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.checkpointing.format.rng_state import preserved_generators
from trainer_lib.events import Run
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.trainer.optim import optimizer_modes

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

_OF_A_BATCH = ("batch", "outputs", "loss_sum", "weight")


@contextmanager
def eval_mode(run: Run, models: Sequence[nn.Module], accelerator: "Accelerator") -> Generator[None]:
    """Return a context in which models evaluate without gradients, and which restores all state for training.

    Args:
        run: The run, whose optimizers may have modes too (schedule-free ones).
        models: The models.
        accelerator: The accelerator: random generators of its device are restored, and those that models hold and, in
            a fit, the loss function and the trainer.
    """
    holders = {"models": models, **accelerator.checkpoints.holders()}
    holders.pop("callbacks", None)  # they may draw for evaluations alone, such as the samples that they show
    with (
        attributes_kept([run], _OF_A_BATCH),
        generators_kept(accelerator.device, holders),
        optimizer_modes.evaluating(run.optimizers.values()),
        evaluating(models),
        torch.no_grad(),
    ):
        yield


@contextmanager
def generators_kept(device: torch.device, holders: Mapping[str, Any]) -> Generator[None]:
    """Restore random generators after the block: the global ones, and those that objects hold.

    Args:
        device: The device of this rank.
        holders: The objects by name.
    """
    from trainer_lib.data_loader.order.held_generators import HeldGenerators

    with preserved_generators(device), HeldGenerators(holders).kept():
        yield


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Generator[None]:
    """Return a context in which models are in evaluation mode; it restores the mode of each module."""
    before = [(model, model.training, [(m, m.training) for m in model.modules()]) for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, was_training, modules in before:
            model.train(was_training)  # a model may override train()
            for module, was in modules:
                if module.training != was:  # a frozen module, such as a BatchNorm
                    module.training = was
