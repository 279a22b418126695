"""The trainings that faults are injected into: small, deterministic, and compared to the bit."""

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.strategies.sharded import stack
from tests.trainer.tasks import arguments, network, trainer
from tests.worlds import forget_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from trainer_lib.events import Modifier, Run
from trainer_lib.modules.weights.state_dicts import module_state

Training = tuple[Accelerator, Any, Any]


class Dies(Modifier):
    """Ends a run after a step, before anything is saved for it."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._at:
            raise InterruptedError


def trained(project: Path, updates: int = 1, **options: Any) -> Training:
    """Return a model and its optimizer after some updates, with states that are numbered."""
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = toy.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, updates)
    return accelerator, model, optimizer


def sharded(project: Path, updates: int = 1, **options: Any) -> Training:
    """Return the same of a model in shards."""
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, **options)
    plugin = FullyShardedDataParallelPlugin(
        state_dict_type="SHARDED_STATE_DICT", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=configuration)
    model, optimizer = accelerator.prepare(made := stack(), torch.optim.AdamW(made.parameters(), lr=0.01))
    train(accelerator, model, optimizer, updates)
    return accelerator, model, optimizer


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def everything(project: Path, updates: int = 1) -> Training:
    """Return a training of which all that can survive a restart does: schedule, loader and an object, too."""
    accelerator, model, optimizer = trained(project, 0)
    loader = DataLoader(TensorDataset(*toy.data()), batch_size=4, shuffle=True)
    accelerator.prepare(loader, torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step)))
    accelerator.register_for_checkpointing(Counter())
    train(accelerator, model, optimizer, updates)
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, updates: int = 1) -> None:
    """Make some updates."""
    inputs, targets, _ = toy.data()
    for _ in range(updates):
        accelerator.backward(toy.losses(model, inputs, targets).mean())
        optimizer.step()
        optimizer.zero_grad()


def state_of(accelerator: Accelerator) -> list[float]:
    """Return what tells one state of a model from another."""
    return [value.sum().item() for value in module_state(accelerator.unwrap_model(accelerator._models[0])).values()]


def loaded(project: Path, folder: Path | None = None) -> list[float]:
    """Return what a fresh script finds."""
    forget_world()
    accelerator, *_ = trained(project, updates=0)
    accelerator.load_state(folder)
    return state_of(accelerator)


def digest(accelerator: Accelerator) -> str:
    """Return what differs if one bit does of what this process holds of models and of their optimizers' states."""
    hasher = hashlib.blake2b(digest_size=16)
    for value in _tensors(accelerator):
        local = value.to_local() if hasattr(value, "to_local") else value
        hasher.update(local.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _tensors(accelerator: Accelerator) -> Iterator[Any]:
    for model in accelerator._models:
        yield from model.parameters()
    for optimizer in accelerator._optimizers:
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def one_run(folder: Path, dies_at: int | None = None, model: nn.Module | None = None, **options: Any) -> Any:
    """Train by a Trainer that saves every second step; return its weights, or nothing if it died."""
    model = model or network(dropout=0.3)
    callbacks = [] if dies_at is None else [Dies(dies_at)]
    model_trainer = trainer(
        arguments(output_dir=folder, **{"save_every": 2, **options}), model=model, callbacks=callbacks
    )
    try:
        model_trainer.fit()
    except InterruptedError:
        return None
    return [parameter.detach().tolist() for parameter in model.parameters()]


def saved_often(
    project: Path, make: Callable[..., Training] = trained, **options: Any
) -> tuple[Any, list[list[float]]]:
    """Save three states under automatic naming; return the engine, and what is in each."""
    accelerator, model, optimizer = make(project, **options)
    losses: list[list[float]] = []
    for _ in range(3):
        train(accelerator, model, optimizer)
        accelerator.save_state()
        losses.append(state_of(accelerator))
    return accelerator, losses


@contextmanager
def warned() -> Generator[list[str]]:
    """Collect what is warned of."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("trainer_lib").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("trainer_lib").removeHandler(handler)
