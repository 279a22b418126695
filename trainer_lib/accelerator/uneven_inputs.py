"""This file is training on data that ends earlier on some processes than on others."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.foundation.pytree import map_leaves, map_tensors
from trainer_lib.options.base import check_flag
from trainer_lib.process_group import ProcessGroup

if TYPE_CHECKING:
    from trainer_lib.accelerator.accelerator import Accelerator


@contextmanager
def joined(accelerator: "Accelerator", joinables: Sequence[Any], even_batches: bool | None) -> Generator[None]:
    """Enter the block of `Accelerator.join_uneven_inputs`."""
    if even_batches is not None:
        check_flag("even_batches", even_batches)
    chosen = _chosen(accelerator, joinables)
    window, strategy = accelerator._window, accelerator.strategy
    with _evenness(accelerator._dataloaders, even_batches):
        accumulates = accelerator.gradient_state.num_steps > 1
        if accumulates:
            _check_windows(accelerator)
        window.waits_for_all = True
        try:
            with strategy.join(chosen, (lambda: _leftovers(accelerator, chosen)) if accumulates else None) as outcome:
                yield
        finally:
            window.waits_for_all = False
    _forget_gradients(accelerator, outcome.given)
    if outcome.source is not None:
        _catch_up(accelerator, chosen, outcome.source)


def _chosen(accelerator: "Accelerator", joinables: Any) -> list[Any]:
    if not isinstance(joinables, (list, tuple)) or not joinables:
        raise ConfigurationError(
            "joinables must be a list of the prepared models that are trained, got "
            f"{'an empty one' if joinables in ([], ()) else f'a {type(joinables).__name__}'}. For one model: "
            "join_uneven_inputs([model])."
        )
    for one in joinables:
        is_prepared = any(one is model for model in accelerator._models)
        if isinstance(one, nn.Module) and not is_prepared:
            raise PreparationError(
                f"join_uneven_inputs got a {type(one).__name__} that is not prepared, and so shares nothing with "
                "other processes. Give what prepare() returned."
            )
        if not is_prepared and (isinstance(one, Optimizer) or not hasattr(one, "join_hook")):
            raise ConfigurationError(f"join_uneven_inputs got a {type(one).__name__}. Name the prepared models only.")
    for optimizer in accelerator._optimizers:
        if hasattr(optimizer.optimizer, "join_hook"):
            raise UnsupportedError(
                f"{type(optimizer.optimizer).__name__} sends weights in its steps, and would have a process without "
                "data make them from gradients that it lacks. Use a plain optimizer with join_uneven_inputs."
            )
    return list(joinables)


@contextmanager
def _evenness(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Read the loaders with another setting of `even_batches`."""
    if even_batches is None:
        yield
        return
    before = [(loader, loader.even_batches) for loader in loaders]
    try:
        for loader, _ in before:
            loader.even_batches = even_batches
        yield
    finally:
        for loader, value in before:
            loader.even_batches = value


def _check_windows(accelerator: "Accelerator") -> None:
    if not accelerator.use_distributed:
        return
    if accelerator.gradient_state.plugin.sync_each_batch:
        raise ConfigurationError(
            "sync_each_batch=True shares each micro-batch of a window, which a process without data cannot follow. "
            "Leave it out with join_uneven_inputs."
        )
    for loader in accelerator._dataloaders:
        if not loader.knows_end_of_all:
            raise ConfigurationError(
                "Each process reads an iterable dataset in a way of its own (split beforehand, or by workers), so none "
                "knows with its last batch whether the others have more, and when the window ends. Read it with "
                "even_batches=True, or with num_workers=0 from one dataset for all."
            )


def _leftovers(accelerator: "Accelerator", joinables: list[Any]) -> dict[nn.Module, float | Tensor]:
    """Return the models whose windows this process leaves unfinished, and what their losses weigh."""
    unfinished = accelerator._window.unfinished()
    left: dict[nn.Module, float | Tensor] = {one: 0.0 for one in joinables if any(one is model for model in unfinished)}
    for optimizers, weight in accelerator._window.weights_so_far():
        # One loss of several models is weighed once.
        owner = next((model for model in left if any(_trains(optimizer, model) for optimizer in optimizers)), None)
        if owner is not None:
            left[owner] = left[owner] + weight
    return left


def _forget_gradients(accelerator: "Accelerator", models: list[nn.Module]) -> None:
    """Drop gradients that went into an update of the others, as the loop would have after it."""
    if not models:
        return
    accelerator.gradient_state.sync_gradients = True  # theirs was complete
    for optimizer in accelerator._optimizers:
        if any(_trains(optimizer, model) for model in models):
            optimizer.zero_grad()
    for model in models:
        model.zero_grad()


def _catch_up(accelerator: "Accelerator", joinables: list[Any], source: int) -> None:
    """Take over from process `source` what the updates that some processes missed have left, besides the weights."""
    optimizers = [
        optimizer
        for optimizer in accelerator._optimizers
        if any(isinstance(model, nn.Module) and _trains(optimizer, model) for model in joinables)
    ]
    schedulers = [
        scheduler
        for scheduler in accelerator._schedulers
        if scheduler.step_with_optimizer and any(optimizer in optimizers for optimizer in scheduler.optimizers)
    ]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    group = accelerator.group
    is_source = group.rank == source
    for part in [*optimizers, *schedulers, *scaler]:
        state = _from_process(source, part.state_dict() if is_source else None, group, accelerator.device)
        if not is_source:
            part.load_state_dict(state)
    # Windows that nobody completed go on after the block, on all processes at the same place.
    models = accelerator._models
    (window,) = group.broadcast_objects([accelerator._window.state_dict(models, []) if is_source else None], source)
    if not is_source:
        accelerator._window.take_over(window, models)


class _Place(NamedTuple):
    """Where a tensor comes in a structure that is sent."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _from_process(source: int, tree: Any, group: ProcessGroup, device: torch.device) -> Any:
    """Return the structure of tensors and objects that process `source` has, its tensors on the like devices here."""
    places = map_tensors(lambda one: _Place(one.shape, one.dtype, one.device.type == "cpu"), tree)
    (places,) = group.broadcast_objects([places], source)
    if group.rank == source:
        map_tensors(lambda one: group.broadcast(one.detach().clone(), source), tree)
        return tree

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_cpu else device)
        return group.broadcast(empty, source)

    return map_leaves(receive, places, lambda node: isinstance(node, _Place))


def _trains(optimizer: Any, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
