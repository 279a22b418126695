"""Sandboxed training for tools: the trainer's own loop, after which all state is restored."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.accelerator import Accelerator
from trainer_lib.checkpointing.format.rng_state import preserved_generators
from trainer_lib.data_loader.order.epoch_start import generators_kept, generators_of_loader
from trainer_lib.data_loader.order.held_generators import HeldGenerators
from trainer_lib.events import Callback, Dispatcher, Modifier
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.modules.module_buffers import Buffers
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.overridable import is_overridden
from trainer_lib.trainer.trainer_interface import TrainerInterface, evaluator_of

# The arguments of a short sandbox, which only makes updates.
_SHORT: Mapping[str, Any] = {
    "output_dir": None,
    "resume": "never",
    "num_train_epochs": None,
    "max_tokens": None,
    "max_time": None,
    "deadline": None,
    "stop_signals": (),
    "lr_scheduler": "constant",  # a plateau needs evaluations
    "lr_scheduler_kwargs": {},
    "warmup": None,
    "schedule_steps": None,
    "log_every": "1 step",
    "eval_every": "never",
    "eval_delay": None,
    "eval_on_start": False,
    "save_every": None,
    "load_best_at_end": False,
    "metric_for_best": None,
    "greater_is_better": None,
    "on_nonfinite": "raise",
    "loss_spike": None,
    "dry_run": False,
    "report_to": (),
}
_PLAIN = (bool, int, float, str, type(None))
_ENGINE_SETTINGS = ("gradient_accumulation_steps", "sync_gradients")


def check_can_sandbox(trainer: TrainerInterface, tool: str) -> None:
    """Check that a tool can train in a sandbox.

    Raises:
        ConfigurationError: If a run is in progress, there is no data, or the data can be read only once.
    """
    if trainer.run.state.status == "running":
        raise ConfigurationError(f"{tool}() cannot run while fit() is in progress. Call it before or after fit().")
    data = trainer.train_dataset
    if data is None and not is_overridden(type(trainer), "train_dataloader"):
        raise ConfigurationError(f"{tool}() needs data: Trainer(train_dataset=…), or override train_dataloader().")
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if hasattr(type(dataset), "__next__"):
        raise ConfigurationError(
            f"{tool}() reads the first batches, which fit() must read again, but train_dataset is an iterator "
            f"({type(dataset).__name__}), which can be read only once. Give a dataset whose __iter__ starts over."
        )


@contextmanager
def sandbox(
    trainer: TrainerInterface, tool: str, args: TrainingArguments, callbacks: Sequence[Callback]
) -> Generator[None]:
    """Return a context in which `fit` trains in a sandbox and leaves no trace.

    Afterwards weights, running statistics, gradients, optimizers, the accelerator, random generators and the trainer's
    attributes are restored bit for bit. The models stay prepared, as after an evaluation. State that a dataset keeps
    about its reads is not restored.

    Args:
        trainer: The trainer; all ranks must enter the sandbox.
        tool: The name of the tool, for errors.
        args: The arguments to train with.
        callbacks: The callbacks. Give copies of those that change training: see `copy_callbacks`.
    """
    check_can_sandbox(trainer, tool)
    before_fit.check(trainer)
    accelerator = trainer.accelerator
    with ExitStack() as stack:
        stack.enter_context(preserved_generators(accelerator.device))
        stack.enter_context(_data_generators_kept(trainer))
        defaults.prepare_models(trainer)
        stack.enter_context(_engine_kept(accelerator))
        stack.enter_context(_models_kept(trainer))
        stack.enter_context(_optimizers_kept(trainer))
        trainer.args, trainer.events = args, Dispatcher(callbacks)
        trainer.parts = dataclasses.replace(
            trainer.parts,
            loss=copy.copy(trainer.parts.loss),
            evaluation=copy.copy(trainer.parts.evaluation),
            make_evaluator=functools.partial(evaluator_of, trainer),
            has_fitted=False,  # so that fit uses the prepared models
            in_sandbox=True,
        )
        yield


@contextmanager
def short_sandbox(
    trainer: TrainerInterface,
    tool: str,
    listening: Sequence[Callback] = (),
    takes_part: Callable[[Callback], bool] = lambda callback: True,
    **changes: Any,
) -> Generator[None]:
    """Return a sandbox in which `fit` only makes updates: it writes, shows and evaluates nothing.

    There is no learning-rate schedule. Of the trainer's callbacks, only those that change training take part.

    Args:
        trainer: The trainer.
        tool: The name of the tool, for errors.
        listening: Further callbacks.
        takes_part: Which of the trainer's modifiers take part.
        **changes: Arguments that replace the trainer's.
    """
    check_can_sandbox(trainer, tool)
    args = dataclasses.replace(trainer.args, **{**_SHORT, **changes})
    modifiers = (callback for callback in trainer.events if isinstance(callback, Modifier) and callback.runs_in_sandbox)
    with sandbox(trainer, tool, args, [*copy_callbacks(trainer, tool, filter(takes_part, modifiers)), *listening]):
        trainer.eval_dataset = None
        vars(trainer)["configure_scheduler"] = _no_schedule
        yield


def copy_callbacks(trainer: TrainerInterface, tool: str, callbacks: Iterable[Callback]) -> list[Callback]:
    """Return copies of callbacks that refer to the same trainer, models and data.

    Raises:
        ConfigurationError: If one cannot be copied.
    """
    models = [trainer.model] if isinstance(trainer.model, nn.Module) else list(trainer.model.values())
    shared = [trainer, trainer.accelerator, trainer.args, trainer.train_dataset, trainer.eval_dataset]
    shared += [part for model in models for part in (*model.modules(), *model.parameters(), *model.buffers())]
    copied: list[Callback] = []
    for callback in callbacks:
        try:
            copied.append(copy.deepcopy(callback, {id(thing): thing for thing in shared}))
        except Exception as error:
            raise ConfigurationError(
                f"{tool}() trains with copies of the callbacks, but {type(callback).__name__} cannot be copied: "
                f"{error}. Give it a __deepcopy__."
            ) from error
    return copied


def _no_schedule(*arguments: Any, **named: Any) -> None:
    del arguments, named


# -- the restored state ----------------------------------------------------------------------------------------------


@contextmanager
def _data_generators_kept(trainer: TrainerInterface) -> Generator[None]:
    """Restore the random generators of the trainer's datasets, loaders and collate functions after the block."""
    data = [trainer.train_dataset, trainer.eval_dataset]
    named = [list(part.values()) if isinstance(part, Mapping) else [part] for part in data]
    holders: list[Any] = [trainer.collate_fn]
    of_loaders: list[Any] = []
    for part in chain.from_iterable(named):
        if isinstance(part, DataLoader):
            of_loaders += generators_of_loader(part)
            holders += [part.dataset, part.collate_fn]
        else:
            holders.append(part)
    with generators_kept(of_loaders), HeldGenerators({"data": holders}).kept():
        yield


@contextmanager
def _engine_kept(accelerator: Accelerator) -> Generator[None]:
    """Empty the accelerator's lists of optimizers, schedules and loaders, and restore them afterwards."""
    window, precision = accelerator.window, accelerator.precision
    counts, scale = dict(vars(window)), precision.state_dict()
    window.reset()
    try:
        with accelerator.prepared.only_models(), attributes_kept([accelerator], _ENGINE_SETTINGS):
            yield
    finally:
        vars(window).update(counts)
        precision.load_state_dict(scale)


@contextmanager
def _models_kept(trainer: TrainerInterface) -> Generator[None]:
    """Restore the models: weights, gradients, running statistics, modes, and plain attributes of modules."""
    accelerator = trainer.accelerator
    modules = [
        *trainer.parts.models.listed,
        *(value for value in vars(trainer).values() if isinstance(value, nn.Module)),
    ]
    bare = [accelerator.strategy.bare(module) for module in modules]
    weights = [_Weight(parameter) for parameter in _parameters(trainer, modules)]
    buffers = Buffers(bare)
    buffers.copy()
    values = [(module, _plain_values(module)) for model in bare for module in model.modules()]
    try:
        yield
    finally:
        _parameters(trainer, modules)
        for weight in weights:
            weight.put_back()
        buffers.restore()
        for module, plain in values:
            vars(module).update(plain)


def _parameters(trainer: TrainerInterface, modules: Iterable[nn.Module]) -> list[Any]:
    """Return each parameter once; for a sharded model its shard, even if a forward left it unsharded."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return list(trainer.accelerator.strategy.current_parameters(parameters.values()))


def _plain_values(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


class _Weight:
    """A parameter and its saved value, which is kept in CPU memory to leave the device's memory free."""

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._is_trained, self._gradient = parameter, parameter.requires_grad, parameter.grad
        self._value = _local(parameter).detach().to("cpu", copy=True) if self._is_trained else None
        self._sum = None if self._gradient is None else _local(self._gradient).detach().to("cpu", copy=True)

    @torch.no_grad()
    def put_back(self) -> None:
        parameter = self._parameter
        parameter.requires_grad_(self._is_trained)
        if self._value is not None:
            _local(parameter).copy_(self._value)
        parameter.grad = self._gradient
        if self._sum is not None:
            _local(self._gradient).copy_(self._sum)


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


@contextmanager
def _optimizers_kept(trainer: TrainerInterface) -> Generator[None]:
    """Restore optimizers, including those that existed before, and the trainer's attributes."""
    before = dict(vars(trainer))
    kept: list[_Optimizer] = []
    vars(trainer)["configure_optimizer"] = _noting(trainer.configure_optimizer, kept)
    try:
        yield
    finally:
        for optimizer in kept:
            optimizer.put_back()
        vars(trainer).clear()
        vars(trainer).update(before)


def _noting(configure: Callable[[], Any], kept: "list[_Optimizer]") -> Callable[[], Any]:
    """Return a `configure_optimizer` that records the state of optimizers before they are prepared."""

    def configure_optimizer() -> Any:
        made = configure()
        optimizers = made.values() if isinstance(made, Mapping) else [made]
        kept.extend(_Optimizer(optimizer) for optimizer in optimizers if isinstance(optimizer, Optimizer))
        return made

    return configure_optimizer


class _Optimizer:
    """An optimizer and its saved state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._attributes = optimizer, dict(vars(optimizer))
        self._options = [{n: (v, copy.deepcopy(v)) for n, v in _options(group)} for group in optimizer.param_groups]
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        optimizer = self._optimizer
        vars(optimizer).clear()
        vars(optimizer).update(self._attributes)
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            parameters = group["params"]
            group.clear()
            # Other objects may refer to a learning rate in a tensor.
            kept = {n: now.copy_(was) if isinstance(now, Tensor) else was for n, (now, was) in options.items()}
            group.update(params=parameters, **kept)
        optimizer.state.clear()
        optimizer.state.update(self._state)


def _options(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in group.items() if name != "params"]
