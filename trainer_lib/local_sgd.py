"""`LocalSGD` and `DiLoCo`: each rank trains its own copy of the model, and the copies meet every few updates."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from trainer_lib.accelerator import Accelerator
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, StateError, UnsupportedError
from trainer_lib.options.base import check_count, check_flag, check_positive


class LocalSGD:
    """The context in which gradients are not reduced, and weights are averaged every few updates and at the end.

    `LocalSGD` averages trained parameters, and floating-point buffers (running statistics) unless
    `DistributedDataParallelKwargs(broadcast_buffers=False)` is set. Integer buffers and optimizer states stay local.
    All ranks must make the same number of updates. A weighted loss (`backward(loss, weight=)`) is a mean over the
    items of its rank. With one rank `LocalSGD` has no effect.

    A checkpoint of `save_state` inside the context holds the average of the weights, and those of each rank beside it;
    the same number of ranks continues with its own if `load_state` is called inside the context too. Outside, all ranks
    get the average, and the optimizer states and registered objects of rank 0. Register the object with
    `register_for_checkpointing` to save the position in the round too.

    Args:
        accelerator: The `Accelerator`.
        model: The prepared model, or a list of prepared models.
        local_sgd_steps: How many updates lie between two averages.
        enabled: Whether to train locally; `False` reduces gradients as usual.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(4, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(16, 3, 4):
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(model(batch).square().mean())
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()
    """

    accelerator: Accelerator
    model: nn.Module | Sequence[nn.Module]
    enabled: bool
    local_sgd_steps: int

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module | Sequence[nn.Module],
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ConfigurationError(f"accelerator must be an Accelerator (got {type(accelerator).__name__}).")
        check_count("local_sgd_steps", local_sgd_steps)
        check_flag("enabled", enabled)
        self.accelerator, self.model = accelerator, model
        self.models: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
        for given in self.models:
            if not any(given is prepared for prepared in accelerator.prepared.models):
                raise PreparationError(
                    f"{type(self).__name__} got a {type(given).__name__} that is not prepared. Give the model that "
                    "prepare() returned."
                )
        self.local_sgd_steps, self.enabled = local_sgd_steps, enabled
        self.num_steps = 0
        if enabled:
            self._check_can_train_locally()
        self._local = ExitStack()

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            window = self.accelerator.window
            for model in self.models:
                self._local.enter_context(self.accelerator.strategy.stay_local(model))
            self._local.callback(setattr, window, "is_local", window.is_local)
            window.is_local = True
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.leave()
        # After an error other ranks may not get here; after an average another one would only round again.
        if self.enabled and kind is None and self.num_steps % self.local_sgd_steps:
            self.average()

    def leave(self) -> None:
        """Reduce gradients again. The weights of this rank stay its own."""
        self._local.close()

    def step(self) -> None:
        """Count an update, and end the round every `local_sgd_steps` updates. Call it after each micro-batch."""
        if self.accelerator.sync_gradients:
            self.count_update()

    def count_update(self) -> bool:
        """Count an update; return whether it ended a round."""
        self.num_steps += 1
        ends = self.enabled and self.num_steps % self.local_sgd_steps == 0
        if ends:
            self.end_round()
        return ends

    def end_round(self) -> None:
        """Average the weights. All ranks call it."""
        self.average()

    def average(self) -> None:
        """Overwrite the weights with their mean over the ranks. All ranks call it."""
        for model in self.models:
            self.accelerator.strategy.average_weights(model)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context, for an evaluation within a round, in which all ranks have the average of the weights.

        All ranks enter it. Afterwards each rank has its own weights again, bit for bit.
        """
        return self.accelerator.strategy.averaged_weights(self.models)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the round."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; an empty one begins a round."""
        self.num_steps: int = state.get("num_steps", 0)

    def _check_can_train_locally(self) -> None:
        accelerator = self.accelerator
        for model in self.models:
            accelerator.strategy.stay_local(model)  # raises now if the strategy cannot
        if accelerator.ranks_per_batch > 1:
            raise UnsupportedError(
                f"{type(self).__name__} does not work where {accelerator.ranks_per_batch} ranks share the batches of "
                "one replica: their gradients have to be reduced in each update. Give a mesh of replicas alone."
            )


class DiLoCo(LocalSGD):
    """`LocalSGD` with an outer optimizer: a round ends with a step of SGD with Nesterov momentum (DiLoCo).

    The gradient of the outer step is the difference between the weights at the start of the round and their average at
    its end. `outer_learning_rate=1` with `outer_momentum=0` is `LocalSGD`. Buffers are averaged. Each rank holds the
    weights at the start of the round and the momentum, two more copies of what is trained. At the end of the context an
    unfinished round ends with the average, without an outer step. The outer step acts with one rank too.

    Args:
        accelerator: The `Accelerator`.
        model: The prepared model, or a list of prepared models.
        local_sgd_steps: How many updates a round has.
        outer_learning_rate: The learning rate of the outer step.
        outer_momentum: The Nesterov momentum of the outer step.
        enabled: Whether to train locally; `False` reduces gradients as usual.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(4, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        >>> with DiLoCo(accelerator, model, local_sgd_steps=8) as diloco:
        ...     for batch in torch.ones(16, 3, 4):
        ...         accelerator.backward(model(batch).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         diloco.step()
    """

    outer_learning_rate: float
    outer_momentum: float

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module | Sequence[nn.Module],
        local_sgd_steps: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        enabled: bool = True,
    ) -> None:
        check_positive("outer_learning_rate", outer_learning_rate)
        if isinstance(outer_momentum, bool) or not 0 <= outer_momentum < 1:
            raise ConfigurationError(f"outer_momentum must be at least 0 and less than 1 (got {outer_momentum!r}).")
        super().__init__(accelerator, model, local_sgd_steps, enabled)
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
        self._weights: dict[str, Tensor] = {}  # what is trained
        self._start: dict[str, Tensor] = {}  # its values at the start of the round
        self._outer: SGD | None = None

    def __enter__(self) -> "DiLoCo":
        super().__enter__()
        if self.enabled and self._outer is None:
            self._begin()
        return self

    @torch.no_grad()
    def end_round(self) -> None:
        """Average the weights, and make an outer step. All ranks call it."""
        self.average()
        assert self._outer is not None
        for name, start in self._start.items():
            weight = self._weights[name]
            # The momentum does not move a weight that is frozen, after the round in which it was.
            if weight.requires_grad or not torch.equal(weight, start.to(weight.dtype)):
                start.grad = start - weight
        self._outer.step()
        self._outer.zero_grad()
        for name, start in self._start.items():
            self._weights[name].copy_(start)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the round, the weights at its start, and the outer momentum."""
        momentum = (
            {} if self._outer is None else {name: self._outer.state[start] for name, start in self._start.items()}
        )
        buffers = {
            name: state["momentum_buffer"]
            for name, state in momentum.items()
            if state.get("momentum_buffer") is not None
        }
        start = {name: start.detach() for name, start in self._start.items()}
        return {**super().state_dict(), "start": start, "momentum": buffers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; an empty one begins a round with the weights of now."""
        super().load_state_dict(state)
        self._begin()
        saved: Mapping[str, Tensor] = state.get("start", {})
        if saved and saved.keys() != self._start.keys():
            differing = sorted(saved.keys() ^ self._start.keys())
            raise StateError(
                f"The checkpoint holds a round of {len(saved)} trained weights, and {len(self._start)} are trained "
                f"now. In only one of the two: {', '.join(differing[:4])}."
            )
        assert self._outer is not None
        for name, value in saved.items():
            self._start[name].copy_(value)
        for name, value in state.get("momentum", {}).items() if self.outer_momentum else ():
            self._outer.state[self._start[name]]["momentum_buffer"] = value.to(self._start[name], copy=True)

    def _begin(self) -> None:
        """Begin a round with the weights of now, without momentum."""
        strategy = self.accelerator.strategy
        self._weights = {
            f"{index}.{name}": parameter
            for index, model in enumerate(self.models)
            for name, parameter in strategy.bare(model).named_parameters()
            if parameter.requires_grad
        }
        # In 32 bits: a 16-bit weight would lose the small steps of the momentum.
        wide = {n: torch.promote_types(weight.dtype, torch.float32) for n, weight in self._weights.items()}
        self._start = {n: weight.detach().to(wide[n], copy=True) for n, weight in self._weights.items()}
        self._outer = SGD(
            self._start.values(),
            lr=self.outer_learning_rate,
            momentum=self.outer_momentum,
            nesterov=self.outer_momentum > 0,
        )
