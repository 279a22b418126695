"""Arguments that change between two calls of a trainer: each takes effect, or an error shows what to do."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from trainer_lib.callbacks.checkpoint import Checkpoint
from trainer_lib.callbacks.gc_interval import GarbageSchedule
from trainer_lib.callbacks.throughput import Throughput
from trainer_lib.events import Callback
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks import at_construction
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup
from trainer_lib.trainer.trainer_interface import TrainerInterface, forget_loss, forget_prepared

# What the engine, the split of the data and the displays are made from. Arguments in none of these lists are read by
# each call.
_ONLY_AT_CONSTRUCTION = (
    *("mixed_precision", "use_cpu", "compile", "fsdp", "deepspeed", "parallelism", "ddp", "fp8"),
    *("optimizer_in_backward", "validation_split", "dry_run", "report_to", "progress_bar"),
)
_OF_LOADERS = "seed", "data_seed", "pin_memory", "seed_each_sample", "low_memory_shuffle"
_OF_LOSS = ("label_names",)
_OF_CALLBACKS: dict[str, type[Callback]] = {
    **dict.fromkeys(("output_dir", "keep_last", "keep_best", "keep_every"), Checkpoint),
    "gc_every": GarbageSchedule,
    "group_by_length": Throughput,
}
# What changes a model when it is prepared, and nothing undoes.
_OF_MODEL = (
    *("gradient_checkpointing", "gradient_checkpointing_every", "gradient_checkpointing_policy", "activation_offload"),
    *("chunked_cross_entropy", "use_liger_kernel", "device_map", "max_memory", "offload_folder", "sync_batchnorm"),
)
_FREEZING = "parameter_groups"
_NAMES = (*_ONLY_AT_CONSTRUCTION, *_OF_LOADERS, *_OF_LOSS, *_OF_CALLBACKS, *_OF_MODEL, _FREEZING)


def remembered(args: TrainingArguments) -> dict[str, Any]:
    """Return the values of the arguments from which parts of a trainer are made."""
    values = {name: getattr(args, name) for name in _NAMES}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


def take_changes(trainer: TrainerInterface) -> None:
    """Check the arguments, and let those that changed since the last call take effect.

    Raises:
        ConfigurationError: If a value is invalid, or a changed one cannot take effect any more.
    """
    if trainer.parts.in_sandbox or trainer.run.state.status == "running":
        return
    trainer.parts.worker_counts.clear()
    trainer.run.args = trainer.args = at_construction.checked_arguments(trainer.args)
    before, now = trainer.parts.arguments, remembered(trainer.args)
    changed = {name for name, value in now.items() if value != before[name]}
    if not changed:
        return
    for name in _ONLY_AT_CONSTRUCTION:
        if name in changed:
            raise ConfigurationError(
                f"{name} is read only when a Trainer is made: it was {shown(before[name])} then, and is "
                f"{shown(now[name])} now. Make another Trainer with TrainingArguments({name}={shown(now[name])})."
            )
    _prepare_again(trainer, changed)
    if changed.intersection(_OF_LOADERS):
        _change_loaders(trainer)
    if changed.intersection(_OF_LOSS):
        forget_loss(trainer)
    if kinds := {kind for name, kind in _OF_CALLBACKS.items() if name in changed}:
        _remake_callbacks(trainer, kinds)
    trainer.parts.arguments = now


def _prepare_again(trainer: TrainerInterface, changed: Collection[str]) -> None:
    """Let the next call prepare the model, if an argument changed that is read then."""
    from trainer_lib.modules.module_kinds import model_has_dtensor

    parts, names = trainer.parts, [name for name in _OF_MODEL if name in changed]
    if _frozen(parts.arguments[_FREEZING]) != _frozen(trainer.args.parameter_groups):
        names.append(_FREEZING)
    if not names or not parts.models.are_prepared:
        return
    is_sharded = any(model_has_dtensor(model) for model in parts.models.listed)  # which nothing puts together again
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name in names:
        before, now = parts.arguments[name], getattr(trainer.args, name)
        switch = "gradient_checkpointing" if name == "gradient_checkpointing_every" else name
        if is_sharded or (name != _FREEZING and parts.arguments[switch] != defaults[switch]):
            raise ConfigurationError(
                f"{name} was {shown(before)} when the model was prepared, and is {shown(now)} now: a prepared model "
                "cannot be changed back. Set trainer.model to another one, or make another Trainer with "
                f"TrainingArguments({name}={shown(now)}) and a model that is not prepared."
            )
    parts.models.unfreeze()
    forget_prepared(trainer)


def _frozen(groups: Sequence[ParameterGroup]) -> list[tuple[str, bool]]:
    """Return what groups say of freezing: the first whose pattern matches counts. Optimizers read the rest."""
    return [(group.pattern, group.frozen) for group in groups] if any(group.frozen for group in groups) else []


def _change_loaders(trainer: TrainerInterface) -> None:
    from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import loader_options

    if trainer.parts.owns_accelerator:
        trainer.accelerator.dataloader_config = loader_options(trainer.args)
    else:
        at_construction.check_accelerator(trainer.accelerator, trainer.args)


def _remake_callbacks(trainer: TrainerInterface, kinds: Collection[type[Callback]]) -> None:
    """Replace default callbacks by those that the arguments make now, unless they were removed."""
    from trainer_lib.trainer import defaults

    parts, events = trainer.parts, trainer.events
    given = defaults.others(events, parts.default_callbacks)
    made = {type(callback): callback for callback in defaults.others(defaults.callbacks(trainer.args, given), given)}
    for kind in kinds:
        former = [callback for callback in parts.default_callbacks if type(callback) is kind]
        if defaults.others(former, events):
            continue
        for callback in former:
            events.remove(callback)
        new = [made[kind]] if kind in made else []
        for callback in new:
            events.add(callback)
        for callback in given:  # after the default ones, as in a new trainer
            events.remove(callback)
            events.add(callback)
        parts.default_callbacks = [*defaults.others(parts.default_callbacks, former), *new]
