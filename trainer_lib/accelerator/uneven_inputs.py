"""Train on data that ends earlier on some ranks than on others (`join_uneven_inputs`)."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.accelerator.engine import Engine
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.foundation.tensors.pytree import map_leaves, map_tensors
from trainer_lib.options.base import check_flag
from trainer_lib.process_group import ProcessGroup


@contextmanager
def joined(engine: Engine, joinables: Sequence[Any], even_batches: bool | None) -> Generator[None]:
    """Enter the block of `Accelerator.join_uneven_inputs`."""
    if even_batches is not None:
        check_flag("even_batches", even_batches)
    chosen = _chosen(engine, joinables)
    window, strategy = engine.window, engine.strategy
    with _loaders_set_to(engine.prepared.dataloaders, even_batches):
        accumulates = engine.window.state.num_steps > 1
        if accumulates:
            _check_windows(engine)
        window.waits_for_all = True
        try:
            with strategy.join(chosen, (lambda: _leftovers(engine, chosen)) if accumulates else None) as outcome:
                yield
        finally:
            window.waits_for_all = False
    _drop_contributed_gradients(engine, outcome.contributed)
    if outcome.source is not None:
        _copy_missed_updates(engine, chosen, outcome.source)


def _chosen(engine: Engine, joinables: Any) -> list[Any]:
    if not isinstance(joinables, (list, tuple)) or not joinables:
        raise ConfigurationError(
            "joinables must be a list of the prepared models that you train (got "
            f"{'an empty list' if joinables in ([], ()) else f'a {type(joinables).__name__}'}). For one model: "
            "join_uneven_inputs([model])."
        )
    chosen = [joinable for joinable in joinables if _takes_part(joinable, engine.prepared.models)]
    for optimizer in engine.prepared.optimizers:
        if hasattr(optimizer.optimizer, "join_hook"):
            raise UnsupportedError(
                f"{type(optimizer.optimizer).__name__} sends weights in its steps, and a rank without data has no "
                "gradients to compute them from. Use a plain optimizer with join_uneven_inputs."
            )
    return chosen


def _takes_part(joinable: Any, models: Sequence[nn.Module]) -> bool:
    """Whether ranks wait for each other in this object; raise for an object that cannot take part."""
    if any(joinable is model for model in models):
        return True
    if isinstance(joinable, nn.Module):
        if not joinable.training:  # evaluated, such as averaged weights: it runs no collectives
            return False
        raise PreparationError(
            f"join_uneven_inputs got a {type(joinable).__name__} that is not prepared, so its gradients are not "
            "reduced across ranks. Give the model that prepare() returned, or call eval() if you only evaluate it."
        )
    if isinstance(joinable, Optimizer) or not hasattr(joinable, "join_hook"):
        raise ConfigurationError(f"join_uneven_inputs takes prepared models only (got a {type(joinable).__name__}).")
    return True


@contextmanager
def _loaders_set_to(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Set `even_batches` of the loaders for the length of the block."""
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


def _check_windows(engine: Engine) -> None:
    if not engine.state.use_distributed:
        return
    if engine.window.state.plugin.sync_each_batch:
        raise ConfigurationError(
            "sync_each_batch=True reduces gradients after each micro-batch, which a rank without data cannot follow. "
            "Leave it out with join_uneven_inputs."
        )
    for loader in engine.prepared.dataloaders:
        if not loader.knows_end_of_all:
            raise ConfigurationError(
                "join_uneven_inputs with gradient accumulation does not work with this iterable dataset: each rank "
                "reads its own part (split beforehand, or by workers), and does not know at its last batch whether "
                "other ranks have more. Give even_batches=True, or num_workers=0 and the same dataset on all ranks."
            )


def _leftovers(engine: Engine, joinables: list[Any]) -> dict[nn.Module, float | Tensor]:
    """Return the models whose accumulation windows are unfinished on this rank, with the weights of their losses."""
    unfinished = {id(model) for model in engine.window.unfinished()}
    leftovers: dict[nn.Module, float | Tensor] = {model: 0.0 for model in joinables if id(model) in unfinished}
    for optimizers, weight in engine.window.weights_so_far():
        # A loss of several models counts once.
        owner = next((model for model in leftovers if any(_trains(optimizer, model) for optimizer in optimizers)), None)
        if owner is not None:
            leftovers[owner] = leftovers[owner] + weight
    return leftovers


def _drop_contributed_gradients(engine: Engine, models: list[nn.Module]) -> None:
    """Zero gradients that went into an update on other ranks, as the loop would after that update."""
    if not models:
        return
    engine.window.state.sync_gradients = True  # the window of the other ranks was complete
    for optimizer in engine.prepared.optimizers:
        if any(_trains(optimizer, model) for model in models):
            optimizer.zero_grad()
    for model in models:
        model.zero_grad()


def _copy_missed_updates(engine: Engine, joinables: list[Any], source: int) -> None:
    """Copy optimizers, schedules, scaler and window from rank `source`, which made the updates that others missed."""
    optimizers = [
        optimizer
        for optimizer in engine.prepared.optimizers
        if any(isinstance(model, nn.Module) and _trains(optimizer, model) for model in joinables)
    ]
    schedulers = [
        scheduler
        for scheduler in engine.prepared.schedulers
        if scheduler.step_with_optimizer and any(optimizer in optimizers for optimizer in scheduler.optimizers)
    ]
    scaler = [] if engine.precision.scaler is None else [engine.precision.scaler]
    group = engine.group
    is_source = group.rank == source
    for part in [*optimizers, *schedulers, *scaler]:
        state = _broadcast_state(source, part.state_dict() if is_source else None, group, engine.device)
        if not is_source:
            part.load_state_dict(state)
    # Windows that no rank completed continue after the block, at the same position on all ranks.
    models = engine.prepared.models
    (window,) = group.broadcast_objects([engine.window.state_dict(models, []) if is_source else None], source)
    if not is_source:
        engine.window.take_over(window, models)


class _TensorSpec(NamedTuple):
    """The placeholder of a tensor in a structure that is broadcast."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _broadcast_state(source: int, tree: Any, group: ProcessGroup, device: torch.device) -> Any:
    """Return rank `source`'s structure of tensors and objects, with its tensors on the CPU or this rank's device."""
    specs = map_tensors(lambda tensor: _TensorSpec(tensor.shape, tensor.dtype, tensor.device.type == "cpu"), tree)
    (specs,) = group.broadcast_objects([specs], source)
    if group.rank == source:
        map_tensors(lambda tensor: group.broadcast(tensor.detach().clone(), source), tree)
        return tree

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, _TensorSpec):
            return leaf
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_cpu else device)
        return group.broadcast(empty, source)

    return map_leaves(receive, specs, lambda node: isinstance(node, _TensorSpec))


def _trains(optimizer: Any, model: nn.Module) -> bool:
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
