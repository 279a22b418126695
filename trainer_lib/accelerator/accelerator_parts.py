"""This file is what of an `Accelerator` survives a restart: the list of parts that a state on disk is made of."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_lib.accelerator.derived_rng import DerivedGenerators
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

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints import Persistence

_logger = get_logger(__name__)


def collect(engine: "Persistence", strict: bool = True, saved_by: Manifest | None = None) -> list[Part]:
    """Return the parts, in the order in which they are saved and loaded.

    The generators are last both times: what is drawn while a state is taken or taken up is drawn before.

    Args:
        engine: The `Accelerator`.
        strict: Whether the names of weights have to be those of the model.
        saved_by: What is known of the state that is loaded, if one is.
    """
    leads, rank, shards = engine.should_save_model, engine.process_index, engine.strategy.writes_shards
    has_whole = engine._has_whole_tensors
    world = engine.num_processes if saved_by is None else saved_by.world_size
    is_new = rank >= world
    # Where the files of each process have their number; a process that was not there reads those of the first.
    own_file = 0 if is_new else rank
    parts: list[Part] = []
    for index, model in enumerate(engine._models):
        state = _Model(engine, model, strict)
        kind = partial(ShardedWeights, rank=rank, targets=state.state_dict) if shards else Weights
        parts.append(kind(index=index, stateful=state, writes=leads and has_whole, reads=has_whole))
    for index, optimizer in enumerate(engine._optimizers):
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
            stateful=one,
            writes=leads,
            class_name=type(one.scheduler).__name__,
        )
        for index, one in enumerate(engine._schedulers)
    ]
    if engine.precision.scaler is not None:
        parts.append(State(kind=SCALER_NAME, stateful=engine.precision, writes=leads))
    # A loader's place is the same on all processes, but what helps to get there (a dataset's own state) may not be.
    parts += [
        State(
            kind=SAMPLER_NAME,
            index=index,
            stateful=one,
            file_name=f"{numbered(SAMPLER_NAME, index)}.process_{own_file}",
        )
        for index, one in enumerate(engine._dataloaders)
    ]
    parts += [
        State(
            kind=CUSTOM_STATE_NAME,
            index=index,
            stateful=one,
            writes=leads,
            file_name=f"{CUSTOM_STATE_NAME}_{index}",
        )
        for index, one in enumerate(engine._custom_objects)
    ]
    # In another world all have to agree on where the window stands.
    is_other_world = world != engine.num_processes
    parts.append(
        State(
            kind=ENGINE_NAME,
            stateful=_Engine(engine, is_other_world),
            file_name=f"{ENGINE_NAME}.process_{0 if is_other_world else rank}",
        )
    )
    generators = Generators(engine.device)
    if is_new and saved_by is not None:
        generators = DerivedGenerators(engine.device, rank, saved_by.backwards)
    parts.append(State(kind=RNG_STATE_NAME, stateful=generators, file_name=f"{RNG_STATE_NAME}_{own_file}"))
    return parts


class _Model:
    """A prepared model."""

    def __init__(self, engine: "Persistence", model: nn.Module, strict: bool) -> None:
        self._engine, self._model, self._strict = engine, model, strict

    def state_dict(self) -> dict[str, Any]:
        strategy = self._engine.strategy
        return strategy.model_state(self._model, whole=not strategy.writes_shards)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.strategy.load_model_state(self._model, state, self._strict)


class _Optimizer:
    """A prepared optimizer."""

    def __init__(self, engine: "Persistence", optimizer: Any) -> None:
        self._engine, self._optimizer = engine, optimizer

    def state_dict(self) -> dict[str, Any]:
        strategy = self._engine.strategy
        whole = not strategy.writes_shards
        return strategy.optimizer_state(self._optimizer.optimizer, self._engine._models, whole=whole)

    def parameters(self) -> dict[str, Tensor]:
        models = [self._engine.strategy.bare(model) for model in self._engine._models]
        return named_parameters(self._optimizer.optimizer, models)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.strategy.load_optimizer_state(self._optimizer.optimizer, self._engine._models, state)


class _Engine:
    """Where the window of gradients stands, and the gradients in it.

    Args:
        engine: The `Accelerator`.
        is_other_world: Whether a state is of another number of processes, so that their gradients are not these ones'.
    """

    def __init__(self, engine: "Persistence", is_other_world: bool = False) -> None:
        self._engine, self._is_other_world = engine, is_other_world
        self._models = [engine.strategy.bare(model) for model in engine._models]

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        holding = [optimizer.holds_gradients for optimizer in engine._optimizers]
        begins_anew = engine.strategy.hands_out and any(map(self._loses_gradients, engine._optimizers))
        if begins_anew:
            _logger.warning_once(
                "Gradients of an unfinished window of accumulation are not part of the state of a sharded model: "
                "the window begins anew when it is loaded. Call save_state after an update."
            )
        gradients = [
            named_gradients(optimizer, self._models) if holds and not engine.strategy.hands_out else {}
            for optimizer, holds in zip(engine._optimizers, holding, strict=True)
        ]
        return {
            "window": engine._window.state_dict(engine._models, engine._optimizers),
            "rounds": [optimizer.round_state() for optimizer in engine._optimizers],
            "gradients": gradients,
            "begins_anew": begins_anew,
        }

    def _loses_gradients(self, optimizer: Any) -> bool:
        # A loss of another optimizer may have been differentiated since this one's update, with nothing left of it.
        return optimizer.holds_gradients and (
            self._engine.strategy.withholds_gradients()
            or any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.precision.state_dict()  # has it settle what is due of steps before, which are to be forgotten
        window = send_to_device(state["window"], engine.device)
        engine._window.load_state_dict(window, engine._models, engine._optimizers)
        begins_anew, gradients_of = state["begins_anew"], state["gradients"]
        if self._is_other_world:
            begins_anew = begins_anew or self._is_unfinished(state)
            gradients_of = [{}] * len(gradients_of)
        if begins_anew:
            engine._window.reset()
            engine._window.state.sync_gradients = True
        rounds = [[0, 0, 0]] * len(engine._optimizers) if begins_anew else state["rounds"]
        for optimizer, round_, gradients in zip(engine._optimizers, rounds, gradients_of, strict=True):
            optimizer.load_round_state(round_)
            load_named_gradients(optimizer.optimizer, self._models, gradients)

    def _is_unfinished(self, state: Mapping[str, Any]) -> bool:
        """Whether a window of accumulation was under way, of which a word is said."""
        micro_batches = max((size for _, size, _ in state["window"]["windows"]), default=0)
        if not micro_batches and not any(state["gradients"]):
            return False
        _logger.warning(
            "The state was saved in the middle of a window of accumulation%s, by another number of processes, whose "
            "gradients mean nothing here: the window begins anew, without what it had learned from. Call save_state "
            "after an update.",
            f" ({micro_batches} micro-batches)" if micro_batches else "",
        )
        return True
