"""What a DeepSpeed config says of the objects given to `prepare`: "auto" values filled, optimizer and schedule made."""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.deepspeed.auto_values import DEFAULTS, training_values
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, values_of
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
from trainer_lib.options.deepspeed.dummy_optimizer import DummyOptim, DummyScheduler

_logger = get_logger(__name__)

# By their names in lower case, as DeepSpeed compares them.
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.AdamW,  # unless adam_w_mode is off
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
_IMPLEMENTATION = ("torch_adam", "adam_w_mode", "bias_correction")  # DeepSpeed's ways to compute the same
_OF_SOME_SCHEDULES = ("total_num_steps", "warmup_num_steps")  # which scripts give to any
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def apply_config(
    plugin: DeepSpeedPlugin | None,
    values: Sequence[Any],
    accumulation_steps: int,
    num_processes: int,
    *,
    has_model: bool = False,
) -> list[Any]:
    """Return the objects with the optimizer and the schedule of the config in the places of the dummies.

    Args:
        plugin: The active plugin.
        values: The objects given to `prepare`.
        accumulation_steps: How many micro-batches make an update.
        num_processes: The world size.
        has_model: Whether a model is prepared already. Loaders, such as one for evaluation, may then have other batch
            sizes than the config.

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
    _check_schedules(plugin, values, schedules)
    _fill(plugin, values, optimizers, schedules, accumulation_steps, num_processes, has_model)
    made = {id(dummy): _optimizer(plugin, dummy) for dummy in optimizers}
    made |= {id(dummy): _schedule(plugin, dummy, made) for dummy in schedules}
    return [made.get(id(value), value) for value in values]


def is_schedule(value: Any) -> bool:
    """Whether this is a schedule of DeepSpeed's, which has no base class of torch."""
    return type(value).__name__ in _SCHEDULES and type(value).__module__.startswith("deepspeed.")


def _check_schedules(plugin: DeepSpeedPlugin, values: Sequence[Any], schedules: Sequence[DummyScheduler]) -> None:
    if not plugin.get_value("scheduler"):
        return
    if any(isinstance(value, LRScheduler) for value in values):
        raise ConfigurationError(
            "prepare got a schedule, and the DeepSpeed config has a section `scheduler`. Give "
            "DummyScheduler(optimizer), or remove the section."
        )
    if not schedules and any(isinstance(value, (DummyOptim, Optimizer)) for value in values):
        _logger.warning(
            "The DeepSpeed config has a section `scheduler`, and prepare got an optimizer without a schedule: the "
            "learning rate stays the same. Give prepare() DummyScheduler(optimizer) too, and call its step()."
        )


def _fill(
    plugin: DeepSpeedPlugin,
    values: Sequence[Any],
    optimizers: Sequence[DummyOptim],
    schedules: Sequence[DummyScheduler],
    accumulation_steps: int,
    num_processes: int,
    has_model: bool,
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
    compared = (
        () if has_model else ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    written = [key for key in compared if plugin.get_value(key) is not None and key not in plugin.filled]
    filled |= {key: known[key] for key in written if key in known}
    plugin.deepspeed_config_process("", None, None, True, **filled)
    for dummy, section in ((optimizers, "optimizer"), (schedules, "scheduler")):
        if dummy:
            _name_differences(plugin, dummy[0], section)


def _learning_rate(optimizers: Sequence[DummyOptim], schedules: Sequence[DummyScheduler]) -> Any:
    """Return the learning rate of the script: of a dummy, or of the optimizer that a schedule follows."""
    for optimizer in (*optimizers, *(schedule.optimizer for schedule in schedules)):
        if isinstance(optimizer, DummyOptim):
            return optimizer.lr
        if isinstance(optimizer, Optimizer):
            return optimizer.defaults.get("lr")
    return None


def _name_differences(plugin: DeepSpeedPlugin, dummy: DummyOptim | DummyScheduler, section: str) -> None:
    """Warn of values that a script gives to a dummy and that the config, which counts, does not have."""
    kind, params = plugin.get_value(f"{section}.type"), plugin.get_value(f"{section}.params") or {}
    for name, value in dummy.given.items() if kind is not None else ():
        of_script = list(value) if isinstance(value, tuple) else value  # JSON has no tuples
        if name not in params and name not in _OF_SOME_SCHEDULES:
            _logger.warning(
                '%s(%s=%r) has no effect: %s.params in the DeepSpeed config has no %r. Add it there; "auto" is the '
                "script's value.",
                type(dummy).__name__,
                name,
                value,
                section,
                name,
            )
        elif params.get(name) not in (None, of_script):
            _logger.warning(
                '%s.params.%s is %r in the DeepSpeed config and %r in %s: the config counts. Write "auto" into it to '
                "use the script's value.",
                section,
                name,
                params[name],
                value,
                type(dummy).__name__,
            )


def _optimizer(plugin: DeepSpeedPlugin, dummy: DummyOptim) -> Optimizer:
    kind, params = plugin.get_value("optimizer.type"), dict(plugin.get_value("optimizer.params") or {})
    if kind is None:
        raise ConfigurationError(
            "DummyOptim stands for the section `optimizer` of the DeepSpeed config, which has none. Add it, or give an "
            "optimizer of torch."
        )
    found = _OPTIMIZERS.get(str(kind).lower())
    if found is None or params.get("bias_correction") is False:
        raise UnsupportedError(
            f"optimizer.type={kind!r} in the DeepSpeed config has no counterpart here (known: AdamW, Adam, SGD, "
            "Adagrad, with bias correction). Remove the section, and give prepare() an optimizer."
        )
    if str(kind).lower() == "adam" and params.get("adam_w_mode") is False:
        found = torch.optim.Adam
    options = {name: value for name, value in params.items() if name not in _IMPLEMENTATION and value != AUTO}
    if found is torch.optim.AdamW and not params.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own; torch's is 0.01
    return _made("optimizer", found, dummy.params, options)


def _made(section: str, kind: Any, subject: Any, options: dict[str, Any]) -> Any:
    """Return an optimizer or a schedule with the values of its section."""
    known = [name for name in inspect.signature(kind).parameters if name not in ("params", "optimizer")]
    for name in options:
        if name == "max_grad_norm":
            raise ConfigurationError(
                f"{section}.params.max_grad_norm in the DeepSpeed config is no option of an optimizer. Write "
                '"gradient_clipping" at the top of the config.'
            )
        if name not in known:
            raise ConfigurationError(unknown(f"key of {section}.params in the DeepSpeed config", name, known))
    try:
        return kind(subject, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{section}.params in the DeepSpeed config do not fit {kind.__name__}: {error}."
        ) from error


def _schedule(plugin: DeepSpeedPlugin, dummy: DummyScheduler, made: dict[int, Any]) -> Any:
    optimizer = made.get(id(dummy.optimizer), dummy.optimizer)
    if isinstance(optimizer, DummyOptim):
        raise ConfigurationError(
            "This DummyScheduler follows a DummyOptim that prepare() did not get with it. Give both to one prepare(), "
            "or DummyScheduler(optimizer) the prepared optimizer."
        )
    kind, params = plugin.get_value("scheduler.type"), dict(plugin.get_value("scheduler.params") or {})
    if kind is None:
        if dummy.lr_scheduler_callable is None:
            raise ConfigurationError(
                "DummyScheduler stands for the section `scheduler` of the DeepSpeed config, which has none. Add it, or "
                "give lr_scheduler_callable."
            )
        return dummy.lr_scheduler_callable(optimizer)
    if kind not in _SCHEDULES:
        raise UnsupportedError(unknown("scheduler.type in the DeepSpeed config", kind, _SCHEDULES))
    without_value = [name for name, value in params.items() if value == AUTO]
    if without_value:
        raise ConfigurationError(
            f'scheduler.params.{without_value[0]} is "auto" in the DeepSpeed config, and no value is known. Give it to '
            "DummyScheduler, or write it into the config."
        )
    made_by = getattr(importlib.import_module("deepspeed.runtime.lr_schedules"), kind)
    return _made("scheduler", made_by, optimizer, params)
