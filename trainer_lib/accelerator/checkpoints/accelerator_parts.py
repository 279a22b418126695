"""The parts of an `Accelerator`'s checkpoint: models, optimizers, schedules, loaders, the window, generators."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainer_lib.accelerator.checkpoints.derived_rng import DerivedGenerators
from trainer_lib.accelerator.engine import Engine
from trainer_lib.checkpointing.format.layout import (
    CUSTOM_STATE_NAME,
    ENGINE_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.checkpointing.format.sharded import ShardedOptimizer, ShardedWeights
from trainer_lib.checkpointing.format.state_parts import Part, State, Weights
from trainer_lib.foundation.pytree import send_to_device
from trainer_lib.logging import get_logger
from trainer_lib.strategies.optimizer_state_names import load_named_gradients, named_gradients, named_parameters

_logger = get_logger(__name__)


def collect(engine: Engine, leads: bool, strict: bool = True, saved_by: Manifest | None = None) -> list[Part]:
    """Return the parts, in the order in which they are saved and loaded.

    The generators come last, since saving or loading another part may draw random numbers.

    Args:
        engine: The engine whose state is saved or loaded.
        leads: Whether this rank writes what all ranks have.
        strict: Whether the names of weights must equal those of the model.
        saved_by: The manifest of the checkpoint to load; `None` for a save.
    """
    prepared, rank, shards = engine.prepared, engine.rank, engine.strategy.writes_shards
    has_whole = engine.has_whole_tensors
    world = engine.world_size if saved_by is None else saved_by.world_size
    is_new = rank >= world
    # Each rank has files under its number; a rank that did not exist at the save reads those of rank 0.
    file_number = 0 if is_new else rank
    parts: list[Part] = []
    for index, model in enumerate(prepared.models):
        state = _Model(engine, model, strict)
        kind = partial(ShardedWeights, rank=rank, targets=state.state_dict) if shards else Weights
        parts.append(kind(index=index, stateful=state, writes=leads and has_whole, reads=has_whole))
    for index, optimizer in enumerate(prepared.optimizers):
        state = _Optimizer(engine, optimizer)
        kind = partial(ShardedOptimizer, rank=rank, targets=state.parameters) if shards else State
        parts.append(
            kind(
                kind=OPTIMIZER_NAME,
                index=index,
                stateful=state,
                writes=leads and has_whole,
                reads=has_whole,
                class_name=type(optimizer.optimizer).__name__,
            )
        )
    parts += [
        State(
            kind=SCHEDULER_NAME,
            index=index,
            stateful=scheduler,
            writes=leads,
            class_name=type(scheduler.scheduler).__name__,
        )
        for index, scheduler in enumerate(prepared.schedulers)
    ]
    if engine.precision.scaler is not None:
        parts.append(State(kind=SCALER_NAME, stateful=engine.precision, writes=leads))
    # All ranks have the same loader position, but a dataset's own state may differ between ranks.
    parts += [
        State(
            kind=SAMPLER_NAME,
            index=index,
            stateful=loader,
            file_name=f"{numbered(SAMPLER_NAME, index)}.process_{file_number}",
        )
        for index, loader in enumerate(prepared.dataloaders)
    ]
    parts += [
        State(
            kind=CUSTOM_STATE_NAME,
            index=index,
            stateful=custom_object,
            writes=leads,
            file_name=f"{CUSTOM_STATE_NAME}_{index}",
        )
        for index, custom_object in enumerate(prepared.custom_objects)
    ]
    # With another world size, all ranks read rank 0's window so that they agree on its position.
    is_other_world = world != engine.world_size
    parts.append(
        State(
            kind=ENGINE_NAME,
            stateful=_Window(engine, is_other_world),
            file_name=f"{ENGINE_NAME}.process_{0 if is_other_world else rank}",
        )
    )
    generators = Generators(engine.device)
    if is_new and saved_by is not None:
        generators = DerivedGenerators(engine.device, rank, saved_by.backwards)
    parts.append(State(kind=RNG_STATE_NAME, stateful=generators, file_name=f"{RNG_STATE_NAME}_{file_number}"))
    return parts


class _Model:
    """A prepared model."""

    def __init__(self, engine: Engine, model: nn.Module, strict: bool) -> None:
        self._strategy, self._model, self._strict = engine.strategy, model, strict

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.model_state(self._model, whole=not self._strategy.writes_shards)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._strategy.load_model_state(self._model, state, self._strict)


class _Optimizer:
    """A prepared optimizer."""

    def __init__(self, engine: Engine, optimizer: Any) -> None:
        self._engine, self._optimizer = engine, optimizer

    def state_dict(self) -> dict[str, Any]:
        strategy = self._engine.strategy
        whole = not strategy.writes_shards
        return strategy.optimizer_state(self._optimizer.optimizer, self._engine.prepared.models, whole=whole)

    def parameters(self) -> dict[str, Tensor]:
        return named_parameters(self._optimizer.optimizer, self._engine.bare_models())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.strategy.load_optimizer_state(self._optimizer.optimizer, self._engine.prepared.models, state)


class _Window:
    """The position in the accumulation window, and the gradients accumulated so far.

    Args:
        engine: The engine.
        is_other_world: Whether the checkpoint has another world size, so that its gradients cannot be loaded.
    """

    def __init__(self, engine: Engine, is_other_world: bool = False) -> None:
        self._engine, self._is_other_world = engine, is_other_world
        self._models = engine.bare_models()

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        holding = [optimizer.holds_gradients for optimizer in engine.prepared.optimizers]
        restarts = engine.strategy.gathers_to_rank_zero and any(map(self._loses_gradients, engine.prepared.optimizers))
        if restarts:
            _logger.warning_once(
                "save_state was called within an accumulation window, and the checkpoint of a sharded model does not "
                "hold its gradients: load_state restarts the window. Call save_state after an update."
            )
        gradients = [
            named_gradients(optimizer, self._models) if holds and not engine.strategy.gathers_to_rank_zero else {}
            for optimizer, holds in zip(engine.prepared.optimizers, holding, strict=True)
        ]
        return {
            "window": engine.window.state_dict(engine.prepared.models, engine.prepared.optimizers),
            "rounds": [optimizer.round_state() for optimizer in engine.prepared.optimizers],
            "gradients": gradients,
            "begins_anew": restarts,
        }

    def _loses_gradients(self, optimizer: Any) -> bool:
        # A backward for another optimizer may have followed this one's update, and left this one no gradients.
        return optimizer.holds_gradients and (
            self._engine.strategy.withholds_gradients()
            or any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.precision.state_dict()  # finishes pending loss-scale updates, which the loaded state replaces
        window = send_to_device(state["window"], engine.device)
        engine.window.load_state_dict(window, engine.prepared.models, engine.prepared.optimizers)
        restarts, gradients_by_optimizer = state["begins_anew"], state["gradients"]
        if self._is_other_world:
            restarts = restarts or self._was_unfinished(state)
            gradients_by_optimizer = [{}] * len(gradients_by_optimizer)
        if restarts:
            engine.window.reset()
            engine.window.state.sync_gradients = True
        rounds = [[0, 0, 0]] * len(engine.prepared.optimizers) if restarts else state["rounds"]
        for optimizer, round_, gradients in zip(
            engine.prepared.optimizers, rounds, gradients_by_optimizer, strict=True
        ):
            optimizer.load_round_state(round_)
            load_named_gradients(optimizer.optimizer, self._models, gradients)

    def _was_unfinished(self, state: Mapping[str, Any]) -> bool:
        """Whether the save happened within an accumulation window; if so, warn."""
        micro_batches = max((size for _, size, _ in state["window"]["windows"]), default=0)
        if not micro_batches and not any(state["gradients"]):
            return False
        _logger.warning(
            "The checkpoint was saved within an accumulation window%s by another number of ranks, so its gradients "
            "cannot be loaded: the window restarts without them. Call save_state after an update.",
            f" ({micro_batches} micro-batches)" if micro_batches else "",
        )
        return True
