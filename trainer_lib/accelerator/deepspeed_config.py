"""What a DeepSpeed config says of the objects given to `prepare`: "auto" values filled, optimizer and schedule made."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.logging import get_logger
from trainer_lib.options.deepspeed.auto_values import DEFAULTS, training_values
from trainer_lib.options.deepspeed.config_file import AUTO, values_of
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
from trainer_lib.options.deepspeed.placeholders import DummyOptim, DummyScheduler

_logger = get_logger(__name__)

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.AdamW,  # unless adam_w_mode is off
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}
_IMPLEMENTATION = ("torch_adam", "adam_w_mode", "bias_correction")  # DeepSpeed's ways to compute the same
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def apply_config(
    plugin: DeepSpeedPlugin | None, values: Sequence[Any], accumulation_steps: int, num_processes: int
) -> list[Any]:
    """Return the objects with the optimizer and the schedule of the config in the places of the dummies.

    Args:
        plugin: The active plugin.
        values: The objects given to `prepare`.
        accumulation_steps: How many micro-batches make an update.
        num_processes: The world size.

    Raises:
        ConfigurationError: If a value of the config differs from that of an object, or a section is missing.
        UnsupportedError: If an optimizer or schedule of the config has no counterpart.
    """
    optimizers = [value for value in values if isinstance(value, DummyOptim)]
    schedules = [value for value in values if isinstance(value, DummyScheduler)]
    if plugin is None:
        if optimizers or schedules:
            raise ConfigurationError(
                "DummyOptim and DummyScheduler stand for those of a DeepSpeed config, and this Accelerator has none. "
                "Give Accelerator(deepspeed_plugin=…), or an optimizer of torch."
            )
        return list(values)
    if plugin.get_value("optimizer") and any(isinstance(value, Optimizer) for value in values):
        raise ConfigurationError(
            "prepare got an optimizer, and the DeepSpeed config has a section `optimizer`. Give DummyOptim(params), or "
            "remove the section."
        )
    _fill(plugin, values, optimizers, schedules, accumulation_steps, num_processes)
    made = {id(dummy): _optimizer(plugin, dummy) for dummy in optimizers}
    made |= {id(dummy): _schedule(plugin, dummy, made) for dummy in schedules}
    return [made.get(id(value), value) for value in values]


def is_schedule(value: Any) -> bool:
    """Whether this is a schedule of DeepSpeed's, which has no base class of torch."""
    return type(value).__name__ in _SCHEDULES and type(value).__module__.startswith("deepspeed.")


def _fill(
    plugin: DeepSpeedPlugin,
    values: Sequence[Any],
    optimizers: Sequence[DummyOptim],
    schedules: Sequence[DummyScheduler],
    accumulation_steps: int,
    num_processes: int,
) -> None:
    sizes = [value.batch_size for value in values if isinstance(value, DataLoader) and value.batch_size is not None]
    known = DEFAULTS | training_values(
        micro_batch_size=plugin.micro_batch_size(sizes) if sizes else None,
        accumulation_steps=accumulation_steps,
        num_processes=num_processes,
        learning_rate=_learning_rate(optimizers, schedules),
        weight_decay=optimizers[0].weight_decay if optimizers else None,
        warmup_steps=schedules[0].warmup_num_steps if schedules else None,
        total_steps=schedules[0].total_num_steps if schedules else None,
    )
    for dummy, section in ((optimizers, "optimizer"), (schedules, "scheduler")):
        if dummy:
            known |= {f"{section}.params.{name}": value for name, value in dummy[0].kwargs.items()}
    known["gradient_clipping"] = 0.0  # "auto": the script clips
    # Accelerate's dummies fill what is "auto"; what the config says counts.
    filled: dict[str, Any] = {
        key: known.get(key, AUTO) for key, value in values_of(plugin.deepspeed_config) if value == AUTO
    }
    compared = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    filled |= {key: known[key] for key in compared if key in known and plugin.get_value(key) is not None}
    plugin.deepspeed_config_process("", None, None, True, **filled)
    for dummy, section in ((optimizers, "optimizer"), (schedules, "scheduler")):
        if dummy:
            _name_differences(plugin, type(dummy[0]).__name__, section, dummy[0].given)


def _learning_rate(optimizers: Sequence[DummyOptim], schedules: Sequence[DummyScheduler]) -> Any:
    """Return the learning rate of the script: of a dummy, or of the optimizer that a schedule follows."""
    for optimizer in (*optimizers, *(schedule.optimizer for schedule in schedules)):
        if isinstance(optimizer, DummyOptim):
            return optimizer.lr
        if isinstance(optimizer, Optimizer):
            return optimizer.defaults.get("lr")
    return None


def _name_differences(plugin: DeepSpeedPlugin, kind: str, section: str, given: Mapping[str, Any]) -> None:
    """Warn of numbers that a script gives to a dummy and that the config, which counts, says otherwise."""
    for name, value in given.items():
        key = f"{section}.params.{name}"
        of_script = list(value) if isinstance(value, tuple) else value  # JSON has no tuples
        if plugin.get_value(key) not in (None, of_script):
            _logger.warning(
                '%s is %r in the DeepSpeed config and %r in %s: the config counts. Write "auto" into it to use the '
                "script's value.",
                key,
                plugin.get_value(key),
                value,
                kind,
            )


def _optimizer(plugin: DeepSpeedPlugin, dummy: DummyOptim) -> Optimizer:
    kind, params = plugin.get_value("optimizer.type"), dict(plugin.get_value("optimizer.params", {}))
    if kind is None:
        raise ConfigurationError(
            "DummyOptim stands for the section `optimizer` of the DeepSpeed config, which has none. Add it, or give an "
            "optimizer of torch."
        )
    if kind not in _OPTIMIZERS or params.get("bias_correction") is False:
        raise UnsupportedError(
            f"optimizer.type={kind!r} in the DeepSpeed config has no counterpart here (known: "
            f"{', '.join(_OPTIMIZERS)}, with bias correction). Remove the section, and give prepare() an optimizer."
        )
    made = torch.optim.Adam if kind == "Adam" and params.get("adam_w_mode") is False else _OPTIMIZERS[kind]
    options = {name: value for name, value in params.items() if name not in _IMPLEMENTATION and value != AUTO}
    return made(dummy.params, **options)


def _schedule(plugin: DeepSpeedPlugin, dummy: DummyScheduler, made: dict[int, Any]) -> Any:
    optimizer = made.get(id(dummy.optimizer), dummy.optimizer)
    kind, params = plugin.get_value("scheduler.type"), dict(plugin.get_value("scheduler.params", {}))
    if kind is None:
        if dummy.lr_scheduler_callable is None:
            raise ConfigurationError(
                "DummyScheduler stands for the section `scheduler` of the DeepSpeed config, which has none. Add it, or "
                "give lr_scheduler_callable."
            )
        return dummy.lr_scheduler_callable(optimizer)
    if kind not in _SCHEDULES:
        raise UnsupportedError(
            f"scheduler.type={kind!r} in the DeepSpeed config is not known (known: {', '.join(_SCHEDULES)})."
        )
    unknown = [name for name, value in params.items() if value == AUTO]
    if unknown:
        raise ConfigurationError(
            f'scheduler.params.{unknown[0]} is "auto" in the DeepSpeed config, and no value is known. Give it to '
            "DummyScheduler, or write it into the config."
        )
    return getattr(importlib.import_module("deepspeed.runtime.lr_schedules"), kind)(optimizer, **params)
