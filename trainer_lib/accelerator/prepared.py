"""The objects that an `Accelerator` has prepared, in the order of their preparation."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.modules.weights.names import class_name
from trainer_lib.optimizer import AcceleratedOptimizer, DeepSpeedOptimizerWrapper
from trainer_lib.scheduler import AcceleratedScheduler
from trainer_lib.strategies import Strategy

_KINDS = (nn.Module, Optimizer, DataLoader, LRScheduler, AcceleratedScheduler)

# Of each wrapper: who prepared it, and how to get the user's object.
_wrappers: "WeakKeyDictionary[Any, tuple[ref[Prepared], Callable[[Any], Any]]]" = WeakKeyDictionary()


class Prepared:
    """Prepared models, optimizers, schedules and loaders, and the objects registered for checkpoints.

    Args:
        strategy: Distributes the models.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._unwrap = strategy.unwrap
        self._current = strategy.current_parameters
        self.models: list[nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[Any] = []
        self.custom_objects: list[Any] = []

    def clear(self) -> None:
        """Forget all objects, so that they can be prepared again."""
        self.keep_models()
        self.models.clear()

    def keep_models(self) -> None:
        """Forget all objects but the models."""
        self._detach_optimizers()
        for objects in (self.optimizers, self.schedulers, self.dataloaders, self.custom_objects):
            objects.clear()

    @contextmanager
    def only_models(self) -> Generator[None]:
        """Forget all objects but the models for the length of a block.

        Optimizers that update in the backward follow gradients inside or outside the block, never both.
        """
        lists: list[list[Any]] = [self.optimizers, self.schedulers, self.dataloaders, self.custom_objects]
        before = [list(objects) for objects in lists]
        self.keep_models()
        try:
            yield
        finally:
            self._detach_optimizers()
            for objects, kept in zip(lists, before, strict=True):
                objects[:] = kept
            for optimizer in self.optimizers:
                optimizer.attach()

    def holds(self, value: Any) -> bool:
        """Whether `prepare` returned this object."""
        return any(value is prepared for prepared in self._objects())

    def add_model(self, model: nn.Module) -> None:
        """Take a prepared model."""
        self.models.append(model)
        if self._unwrap(model) is not model:
            self._remember(model, attrgetter("module"))  # the strategy's `unwrap` would keep the model alive

    def add_optimizer(self, optimizer: AcceleratedOptimizer) -> None:
        """Take a prepared optimizer."""
        self.optimizers.append(optimizer)
        # A wrapper of DeepSpeed's leads to an engine that ends with its Accelerator.
        if not isinstance(optimizer, DeepSpeedOptimizerWrapper):
            self._remember(optimizer, _wrapped)

    def add_scheduler(self, scheduler: AcceleratedScheduler) -> None:
        """Take a prepared schedule."""
        self.schedulers.append(scheduler)
        self._remember(scheduler, _wrapped)

    def add_dataloader(self, loader: Any, users: DataLoader[Any]) -> None:
        """Take a prepared loader, made around the user's."""
        self.dataloaders.append(loader)
        self._remember(loader, lambda _: users)

    def user_object(self, value: Any) -> Any:
        """Return the user's object inside a wrapper that was released or whose Accelerator is gone, else the value."""
        if not isinstance(value, _KINDS) or value not in _wrappers:
            return value
        owner, unwrap = _wrappers[value]
        prepared = owner()
        return value if prepared is not None and prepared.holds(value) else unwrap(value)

    def check_new(self, values: Iterable[Any]) -> None:
        """Raise if one of the values is inside a prepared one, given twice, or prepared by another Accelerator."""
        known = {id(inner) for value in self._objects() for inner in (value, self._inside(value))}
        seen: set[int] = set()
        for value in values:
            if self.holds(value):
                continue
            is_taken = id(value) in known or id(value) in seen
            # A wrapper that `user_object` did not open is another Accelerator's.
            if isinstance(value, _KINDS) and (is_taken or _is_prepared(value) or value in _wrappers):
                raise PreparationError(
                    f"This {class_name(value)} is prepared already. Use the object that prepare() returned, "
                    "or call free_memory() before you prepare it again."
                )
            seen.add(id(value))

    def check_models_of(self, optimizers: Iterable[AcceleratedOptimizer], all_parameters: bool) -> None:
        """Raise if optimizers train parameters that are in no prepared model.

        Args:
            optimizers: The optimizers.
            all_parameters: Whether every parameter must be in a prepared model, or only one of each optimizer.
        """
        if not self.models:
            return
        known = {id(parameter) for model in self.models for parameter in model.parameters()}
        known |= {id(held) for model in self.models for held in self._current(model.parameters())}
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [parameter for parameter in parameters if id(parameter) not in known]
            if foreign and (all_parameters or len(foreign) == len(parameters)):
                raise PreparationError(
                    f"{len(foreign)} of the {len(parameters)} parameters of this {optimizer.class_name} "
                    f"are in no prepared model (the first has the shape {tuple(foreign[0].shape)}). Create the "
                    "optimizer from the parameters of the model that you prepare with it."
                )

    def optimizers_of(self, scheduler: Any) -> Sequence[AcceleratedOptimizer]:
        """Return the optimizers that a schedule follows: its own one, or all if that is not prepared."""
        own = getattr(scheduler, "optimizer", None)
        own = own.optimizer if isinstance(own, AcceleratedOptimizer) else own
        # The list itself: an optimizer may be prepared after its schedule.
        return [
            optimizer
            for optimizer in self.optimizers
            if own in (optimizer.optimizer, getattr(optimizer.optimizer, "optimizer", None))
        ] or self.optimizers

    def finalize_gradients_of(self, parameters: Sequence[Tensor]) -> None:
        """Unscale the gradients of the optimizers that train one of these parameters, and divide them by the weight."""
        if len(self.optimizers) == 1:
            self.optimizers[0].finalize_gradients()
            return
        chosen = {id(parameter) for parameter in parameters}
        for optimizer in self.optimizers:
            if any(id(parameter) in chosen for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.finalize_gradients()

    def _detach_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.detach()

    def _remember(self, wrapper: Any, unwrap: Callable[[Any], Any]) -> None:
        _wrappers[wrapper] = ref(self), unwrap

    def _inside(self, value: Any) -> Any:
        """Return the user's object inside a prepared one."""
        return self._unwrap(value) if isinstance(value, nn.Module) else _wrapped(value)

    def _objects(self) -> Iterator[Any]:
        yield from self.models
        yield from self.optimizers
        yield from self.schedulers
        yield from self.dataloaders


def list_of(name: str) -> property:
    """Return the property of an `Accelerator` that is one of the lists of its `prepared` objects."""
    return property(
        lambda accelerator: getattr(accelerator.prepared, name),
        lambda accelerator, values: setattr(accelerator.prepared, name, values),
    )


def _wrapped(value: Any) -> Any:
    for name in ("optimizer", "scheduler"):
        if name in getattr(value, "__dict__", ()):
            return value.__dict__[name]
    return value


def _is_prepared(value: Any) -> bool:
    if isinstance(value, nn.Module):
        # Accelerate's mark alone changes nothing about a model; its wrapper around the forward does.
        return "_original_forward" in vars(value) and getattr(value, "_is_accelerate_prepared", False)
    return isinstance(value, (AcceleratedOptimizer, AcceleratedScheduler)) or getattr(
        value, "_is_accelerate_prepared", False
    )
