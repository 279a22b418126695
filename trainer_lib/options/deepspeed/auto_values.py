"""Values for the `"auto"` entries of a DeepSpeed config, from what a script trains with."""

from collections.abc import Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, HfDeepSpeedConfig, values_of

_REDUCE_BUCKET = "zero_optimization.reduce_bucket_size"
_PREFETCH_BUCKET = "zero_optimization.stage3_prefetch_bucket_size"
_PERSISTENCE = "zero_optimization.stage3_param_persistence_threshold"
# Sizes that suit a model; another size in a file is no conflict.
_SUGGESTED = (_REDUCE_BUCKET, _PREFETCH_BUCKET, _PERSISTENCE)
DEFAULTS: dict[str, Any] = {
    "scheduler.params.warmup_min_lr": 0,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
"""What an "auto" becomes that follows from nothing."""


def training_values(
    *,
    micro_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    num_processes: int | None = None,
    gradient_clipping: float | None = None,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    warmup_steps: int | None = None,
    total_steps: int | None = None,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """Return values by their dotted keys in a DeepSpeed config; what is `None`, or follows from a `None`, is left out.

    Steps are optimizer steps.

    Example:
        >>> training_values(micro_batch_size=4, accumulation_steps=2, num_processes=2)["train_batch_size"]
        16
    """
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "optimizer.params.lr": learning_rate,
        "optimizer.params.weight_decay": weight_decay,
        "scheduler.params.warmup_max_lr": learning_rate,
        # DeepSpeed refuses 0, for which it did what it does for 1: its shortest warm-up takes two steps.
        "scheduler.params.warmup_num_steps": None if warmup_steps is None else max(1, warmup_steps),
        "scheduler.params.total_num_steps": total_steps,
    }
    if micro_batch_size is not None and accumulation_steps is not None and num_processes is not None:
        values["train_batch_size"] = micro_batch_size * accumulation_steps * num_processes
    if hidden_size is not None:
        values |= {
            _REDUCE_BUCKET: hidden_size * hidden_size,
            _PREFETCH_BUCKET: hidden_size * hidden_size * 9 // 10,
            _PERSISTENCE: 10 * hidden_size,
        }
    return {key: value for key, value in values.items() if value is not None}


def fill_auto_values(config: HfDeepSpeedConfig, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Replace each `"auto"` of a config, or of its section at `prefix`; return the new values by their dotted keys.

    Raises:
        ConfigurationError: If there is no value for an `"auto"`; the config is then unchanged.
    """
    keys = [key for key, value in values_of(config.config) if value == AUTO]
    values = DEFAULTS | dict(values)
    unknown = [f"{prefix}{key}" for key in keys if f"{prefix}{key}" not in values]
    if unknown:
        raise ConfigurationError(
            f'The DeepSpeed config has "auto" where no value is known: {", ".join(unknown)}. Write the values into the '
            "config."
        )
    for key in keys:
        config.set_value(key, values[f"{prefix}{key}"])
    return {f"{prefix}{key}": values[f"{prefix}{key}"] for key in keys}


def conflicts(config: HfDeepSpeedConfig, values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a sentence part, with both values, for each value of a config that differs from `values`."""
    return [
        f"{prefix}{key} is {value!r} in the DeepSpeed config and {values[prefix + key]!r} in the arguments"
        for key, value in values_of(config.config)
        if prefix + key in values and prefix + key not in _SUGGESTED
        if value is not None and value not in (AUTO, values[prefix + key])
    ]


def refuse_conflicts(found: list[str]) -> None:
    """Raise if there are conflicts."""
    if found:
        raise ConfigurationError(
            f'{"; ".join(found)}. Make the values equal, or write "auto" into the DeepSpeed config.'
        )
