"""The state of a rank that trains a copy of its own (`LocalSGD`, `DiLoCo`): what differs from the other ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.accelerator.engine import Engine
from trainer_lib.strategies import Strategy
from trainer_lib.strategies.ddp.param_averaging import trained_parameters


def averaged_state(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    """Return the state of a model with the mean of its weights over the ranks. All ranks call it."""
    with strategy.averaged_weights([model]):
        copies: dict[Any, Tensor] = {}  # tied weights stay one tensor
        return {
            name: copies.setdefault(_memory(value), value.clone()) if isinstance(value, Tensor) else value
            for name, value in strategy.model_state(model).items()
        }


class LocalState:
    """The weights, optimizer states and registered objects of this rank.

    Rank 0 has no optimizer states and objects here: those of the checkpoint are its own.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        engine, prepared = self._engine, self._engine.prepared
        objects = [each.state_dict() for each in prepared.custom_objects]  # on all ranks: they may communicate
        optimizers = [engine.strategy.optimizer_state(each.optimizer, prepared.models) for each in prepared.optimizers]
        return {
            "weights": [self._tensors(model) for model in engine.bare_models()],
            "optimizers": optimizers if engine.rank else [],
            "objects": objects if engine.rank else [],
            "scaler": {} if engine.precision.scaler is None else engine.precision.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same rank."""
        engine, prepared = self._engine, self._engine.prepared
        for model, saved in zip(engine.bare_models(), state["weights"], strict=True):
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, value in saved.items():  # of what was trained then, which may be other weights than now
                tensors[name].copy_(value)
        for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=False):
            engine.strategy.load_optimizer_state(optimizer.optimizer, prepared.models, saved)
        for custom, saved in zip(prepared.custom_objects, state["objects"], strict=False):
            custom.load_state_dict(saved)
        if state["scaler"] and engine.precision.scaler is not None:
            engine.precision.load_state_dict(state["scaler"])

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        trained = trained_parameters(model, (each.optimizer for each in self._engine.prepared.optimizers))
        return {**{name: value.detach() for name, value in trained.items()}, **dict(model.named_buffers())}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
