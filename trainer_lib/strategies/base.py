"""`Strategy`: the interface of all ways to distribute a model over ranks, with defaults for whole models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.state_dicts import inner_module, load_module_state, module_state
from trainer_lib.options.base import KwargsHandler
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.clip_grad_norm import clip_whole, norm_of_whole, shrink

Leftovers = dict[nn.Module, float | Tensor]
Surroundings = Callable[[int], AbstractContextManager[Any]]  # of a micro-batch, by its number in the window
_logger = get_logger(__name__)
_NOTHING = nullcontext[None]()


def no_surroundings(micro_batch: int) -> AbstractContextManager[Any]:
    """Return a context that does nothing, in which a micro-batch is computed."""
    del micro_batch
    return _NOTHING


@dataclass(eq=False)
class JoinOutcome:
    """The outcome of a block in which some ranks may have run out of data early.

    Args:
        contributed: The models whose unfinished gradients on this rank went into an update of the other ranks.
        source: The rank that made all updates; `None` if all ranks did.
    """

    contributed: list[nn.Module] = field(default_factory=list[nn.Module])
    source: int | None = None


class Strategy(ABC):
    """Distributes a model over ranks: how it is wrapped, when gradients are reduced, and how its state is collected.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        options: The options of the strategy.
    """

    # Whether a checkpoint consists of shards, each written by the rank that holds it.
    writes_shards: bool = False
    # Whether whole tensors exist on rank 0 only, which broadcasts what the other ranks need.
    gathers_to_rank_zero: bool = False
    # Whether a forward on one rank waits for a forward on the other ranks.
    needs_lockstep: bool = False

    def __init__(self, group: ProcessGroup, device: torch.device, options: KwargsHandler | None = None) -> None:
        self.group = group
        self.device = device
        self.options = options
        self._averages: Sequence[float | Tensor] = ()

    @property
    def is_in_lockstep(self) -> bool:
        """Whether a forward here waits for a forward on other ranks: it needs lockstep, and there are others."""
        return self.needs_lockstep and self.group.size > 1

    def set_ddp_options(self, options: DistributedDataParallelKwargs | None) -> None:
        """Warn that the options of DDP are ignored: models are distributed in another way."""
        if options is not None:
            _logger.warning_once("DistributedDataParallelKwargs are ignored: DDP does not run.")

    def weights_may_freeze(self) -> AbstractContextManager[Any]:
        """Return the context in which models are distributed whose weights may be frozen later."""
        return nullcontext()

    # -- the model -----------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to this rank's device."""
        return model.to(self.device)

    @abstractmethod
    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Return the distributed model.

        Args:
            model: The model.
            evaluation_mode: The model is only evaluated, so its gradients need not be reduced.
        """

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step instead of one that is prepared, before its `rebind_parameters`."""
        return optimizer

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Replace parameters of an optimizer that was created before `distribute` by those that train now.

        Called for each optimizer when it is prepared, and again for all when another model is. What a strategy does
        after an update is a hook of the optimizer (`register_step_post_hook`), added here once.
        """
        del optimizer

    def current_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Return the parameters that optimizers hold for those that a forward may have put in their places."""
        return parameters

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside the one that `distribute` returned."""
        return model

    def evaluation_module(self, model: nn.Module) -> nn.Module:
        """Return the module to call for a forward without gradients. All ranks call it.

        Unless the strategy `needs_lockstep`, its forward runs no collectives, so ranks may make different numbers of
        them.
        """
        return self.unwrap(model)

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the user's module without DDP's and torch.compile's wrappers."""
        return inner_module(self.unwrap(inner_module(model)))

    def whole_shapes(self, model: nn.Module) -> nn.Module:
        """Return a module with the parameters of the whole model, perhaps without their values."""
        return self.bare(model)

    def whole_name(self, name: str) -> str:
        """Return the first name that a parameter of this rank has in the whole model."""
        return name

    def names_of_all_parts(self, names: Iterable[str]) -> set[str]:
        """Return the names that all parts of a model have together. All ranks call it."""
        return set(names)

    def with_other_parts(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return, on rank 0, the values by name of all parts of a model. All ranks call it."""
        return values

    def release(self) -> None:
        """Release the models and pending values."""
        self._averages = ()

    # -- gradients -----------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` does not reduce gradients across ranks."""

    @abstractmethod
    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` reduces the gradients of a forward that ran in `no_sync`."""

    def withholds_gradients(self) -> bool:
        """Whether gradients of a forward in `no_sync` are stored elsewhere than in the parameters' `grad`."""
        return False

    @abstractmethod
    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Average `values` over the ranks, together with the gradients of the next `backward`."""

    def received_averages(self) -> Sequence[float | Tensor]:
        """Return, after `backward`, the averages of the values that `send_with_gradients` got."""
        values, self._averages = self._averages, ()
        return values

    def why_gradients_are_late(self) -> str | None:
        """Return why gradients are complete only after the backward; `None` if a parameter's hooks see its whole one.

        The reason is the middle of a text: a sentence that has begun, and what to do instead without its full stop.
        """
        return f"{type(self).__name__} completes gradients after it. Take another strategy"

    def check_local_backwards(self) -> None:  # noqa: B027  (by default all ranks can)
        """Raise if ranks cannot run backwards without collectives (see `begin_local_backwards`)."""

    def begin_local_backwards(self, models: Sequence[nn.Module]) -> None:
        """Synchronize buffers, so that forwards and backwards in `no_sync` need no collectives. All ranks call it."""
        del models

    def end_local_backwards(
        self, models: Sequence[nn.Module], values: Sequence[float | Tensor]
    ) -> Sequence[float | Tensor]:
        """Average gradients of backwards in `no_sync` over the ranks, and return the averages of `values`."""
        del models
        return values

    @abstractmethod
    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Return the context of a training loop in which some ranks may run out of data early.

        Args:
            joinables: The models, and other objects that run collectives in a step and have a `join_hook`.
            leftovers: Returns, at the end of this rank's data, the models with unfinished accumulation windows and
                the weights of their losses; `None` if each micro-batch updates.
        """

    @abstractmethod
    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which each rank trains its own model (local SGD)."""

    @abstractmethod
    def average_weights(self, model: nn.Module) -> None:
        """Overwrite the weights with their mean over the ranks, those frozen since the last mean included."""

    @contextmanager
    def averaged_weights(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Return the context in which the weights are their mean over the ranks; then they are this rank's again."""
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        kept = [(t, t.detach().clone()) for t in tensors if t.is_floating_point() or t.is_complex()]
        try:
            for model in models:
                self.average_weights(model)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients to a total norm of at most `max_norm`, and return the norm before clipping."""
        return clip_whole(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp each gradient to ±`clip_value`."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over all gradients; `in_double` avoids overflow in squares of large values.

        It is the same on all ranks, even if their gradients differ: it decides whether an update is skipped.
        """
        return norm_of_whole(parameters, norm_type, in_double)

    def shrink_gradients(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale gradients of the known total norm `norm` to a norm of at most `max_norm`."""
        shrink(parameters, max_norm, norm)

    def takes_windows(self, model: nn.Module) -> bool:
        """Whether `run_window` computes all micro-batches of a window of this model at once."""
        del model
        return False

    def run_window(
        self,
        model: nn.Module,
        compute: Callable[[int], tuple[Tensor, Any]],
        shapes: Sequence[Hashable],
        around: Surroundings = no_surroundings,
    ) -> list[Any]:
        """Compute the gradients of the micro-batches of a window at once, and return their facts on all ranks.

        Args:
            model: The prepared model, which `takes_windows`.
            compute: Returns the loss of a micro-batch and its facts, such as its weight. It calls the model once, and
                may be left at that call.
            shapes: What decides the shapes of activations, for each micro-batch.
            around: Returns the context in which forward and backward of a micro-batch run.

        Raises:
            NotImplementedError: If the strategy takes no windows; those that do override both methods.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no windows.")

    # -- states --------------------------------------------------------------------------------------------------

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's tensors under the names of the unwrapped model. All ranks call it.

        Args:
            model: The prepared model.
            whole: Gather whole tensors, if the strategy shards them; rank 0 gets them. Else return this rank's shards.
        """
        del whole
        return module_state(self.bare(model))

    def exported_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's whole tensors for the user's script. All ranks call it; rank 0 gets them."""
        return self.model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state that `model_state` returned. All ranks call it.

        Raises:
            StateError: If names (with `strict`) or shapes differ.
        """
        load_module_state(self.bare(model), state, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameter names. All ranks call it.

        Args:
            optimizer: The optimizer.
            models: The prepared models with its parameters; with several models, names begin with the model's number.
            whole: See `model_state`.
        """
        from trainer_lib.strategies.optimizer_state_names import named_state

        del whole
        return named_state(optimizer, [self.bare(model) for model in models])

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load a state that `optimizer_state` returned. All ranks call it.

        Raises:
            StateError: If its groups hold other parameters.
        """
        from trainer_lib.strategies.optimizer_state_names import load_named_state

        load_named_state(optimizer, [self.bare(model) for model in models], state)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to continue, besides the states of models and optimizers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, in any world."""
        del state
