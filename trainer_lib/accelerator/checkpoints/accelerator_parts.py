"""The parts of an `Accelerator`'s checkpoint: models, optimizers, schedules, loaders, the window, generators."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainer_lib.accelerator.checkpoints.local_state import LocalState, averaged_state
from trainer_lib.accelerator.checkpoints.rank_generators import DerivedGenerators, RankGenerators
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
from trainer_lib.checkpointing.format.state_parts import Part, State, Weights
from trainer_lib.data_loader.order.held_generators import HeldGenerators
from trainer_lib.foundation.tensors.pytree import send_to_device
from trainer_lib.logging import get_logger
from trainer_lib.strategies.optimizer_state_names import load_named_gradients, named_gradients, named_parameters

_logger = get_logger(__name__)


def collect(
    engine: Engine,
    leads: bool,
    holders: Mapping[str, Any],
    strict: bool = True,
    saved_by: Manifest | None = None,
) -> list[Part]:
    """Return the parts, in the order in which they are saved and loaded.

    The generators come last, since saving or loading another part may draw random numbers.

    Args:
        engine: The engine whose state is saved or loaded.
        leads: Whether this rank writes what all ranks have.
        holders: Objects whose random generators belong to the state, besides models and loaders.
        strict: Whether the names of weights must equal those of the model.
        saved_by: The manifest of the checkpoint to load; `None` for a save.
    """
    rank = engine.rank
    if saved_by is not None:
        rank = engine.first_of_replica  # those of one replica continue alike, whatever they were at the save
    world = engine.world_size if saved_by is None else saved_by.world_size
    is_new = rank >= world
    # Each rank has files under its number; a rank that did not exist at the save reads those of rank 0.
    file_number = 0 if is_new else rank
    parts = [*_models(engine, leads, strict), *_optimizers(engine, leads), *_schedulers(engine, leads)]
    if engine.precision.scaler is not None:
        parts.append(State(kind=SCALER_NAME, stateful=engine.precision, writes=leads))
    parts += [*_loaders(engine, file_number), *_custom_objects(engine, leads), _window(engine, world)]
    held = HeldGenerators({"models": engine.bare_models(), **holders})
    generators = RankGenerators(engine.device, held)
    if is_new and saved_by is not None:
        generators = DerivedGenerators(engine.device, held, rank, saved_by.backwards)
    return [*parts, State(kind=RNG_STATE_NAME, stateful=generators, file_name=f"{RNG_STATE_NAME}_{file_number}")]


def _models(engine: Engine, leads: bool, strict: bool) -> Iterator[Part]:
    has_whole = engine.has_whole_tensors
    for index, model in enumerate(engine.prepared.models):
        state = _Model(engine, model, strict)
        kind = Weights
        if engine.strategy.writes_shards:
            from trainer_lib.checkpointing.format.sharded import ShardedWeights

            kind = partial(ShardedWeights, rank=engine.rank, targets=state.state_dict)
        yield kind(index=index, stateful=state, writes=leads and has_whole, reads=has_whole)


def _optimizers(engine: Engine, leads: bool) -> Iterator[Part]:
    has_whole = engine.has_whole_tensors
    for index, optimizer in enumerate(engine.prepared.optimizers):
        state = _Optimizer(engine, optimizer)
        kind = State
        if engine.strategy.writes_shards:
            from trainer_lib.checkpointing.format.sharded import ShardedOptimizer

            kind = partial(ShardedOptimizer, rank=engine.rank, targets=state.parameters)
        yield kind(
            kind=OPTIMIZER_NAME,
            index=index,
            stateful=state,
            writes=leads and has_whole,
            reads=has_whole,
            class_name=optimizer.class_name,
        )


def _schedulers(engine: Engine, leads: bool) -> Iterator[Part]:
    for index, scheduler in enumerate(engine.prepared.schedulers):
        name = type(scheduler.scheduler).__name__
        yield State(kind=SCHEDULER_NAME, index=index, stateful=scheduler, writes=leads, class_name=name)


def _loaders(engine: Engine, file_number: int) -> Iterator[Part]:
    """Yield the loaders: all ranks have the same position, but a dataset's own state may differ between ranks."""
    for index, loader in enumerate(engine.prepared.dataloaders):
        file_name = f"{numbered(SAMPLER_NAME, index)}.process_{file_number}"
        yield State(kind=SAMPLER_NAME, index=index, stateful=loader, file_name=file_name)


def _custom_objects(engine: Engine, leads: bool) -> Iterator[Part]:
    for index, custom in enumerate(engine.prepared.custom_objects):
        name = f"{CUSTOM_STATE_NAME}_{index}"
        yield State(kind=CUSTOM_STATE_NAME, index=index, stateful=custom, writes=leads, file_name=name)


def _window(engine: Engine, world: int) -> Part:
    """Return the window; with another world size, all ranks read rank 0's, so that they agree on its position."""
    is_other_world = world != engine.world_size
    number = 0 if is_other_world else engine.rank
    return State(
        kind=ENGINE_NAME, stateful=_Window(engine, is_other_world), file_name=f"{ENGINE_NAME}.process_{number}"
    )


class _Model:
    """A prepared model."""

    def __init__(self, engine: Engine, model: nn.Module, strict: bool) -> None:
        self._strategy, self._model, self._strict = engine.strategy, model, strict
        self._trains_locally = engine.trains_locally

    def state_dict(self) -> dict[str, Any]:
        if self._trains_locally:
            return averaged_state(self._strategy, self._model)
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
        self._local = LocalState(engine)

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
            **({"local": self._local.state_dict()} if engine.trains_locally else {}),
            **({"strategy": strategy} if (strategy := engine.strategy.state_dict()) else {}),
        }

    def _loses_gradients(self, optimizer: Any) -> bool:
        # A backward for another optimizer may have followed this one's update, and left this one no gradients.
        return optimizer.holds_gradients and (
            self._engine.strategy.withholds_gradients()
            or any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        if "local" in state and not self._is_other_world:
            self._load_local(state["local"])
        engine.strategy.load_state_dict(state.get("strategy", {}))
        engine.precision.state_dict()  # finishes pending loss-scale updates, which the loaded state replaces
        window = send_to_device(state["window"], engine.device)
        engine.window.load_state_dict(window, engine.prepared.models, engine.prepared.optimizers)
        restarts, gradients_by_optimizer = state["begins_anew"], state["gradients"]
        if self._is_other_world or (engine.strategy.gathers_to_rank_zero and any(gradients_by_optimizer)):
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

    def _load_local(self, state: Mapping[str, Any]) -> None:
        if self._engine.trains_locally:
            self._local.load_state_dict(state)
            return
        _logger.warning_once(
            "The checkpoint was saved within LocalSGD or DiLoCo and is loaded outside: all ranks continue with the "
            "mean of the weights and rank 0's optimizer states. To continue with each rank's own, call load_state "
            "inside the context."
        )

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
