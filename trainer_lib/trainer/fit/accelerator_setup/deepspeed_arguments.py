"""A DeepSpeed config beside training arguments: the arguments fill its "auto" values, and the others must agree."""

from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.deepspeed.auto_values import training_values
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, values_of
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

# Of the optimizer named in the arguments.
_OPTIMIZERS = {"adamw": ("adamw", "adam"), "adam": ("adam",), "sgd": ("sgd",), "adagrad": ("adagrad",)}
# DeepSpeed's schedule for each one named in the arguments.
_SCHEDULES = {
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}
# DeepSpeed's ways to compute the same.
_IMPLEMENTATION = ("torch_adam", "adam_w_mode", "bias_correction")


def deepspeed_plugin(args: TrainingArguments, num_processes: int) -> DeepSpeedPlugin:
    """Return the plugin that the arguments ask for, with each "auto" filled that an argument knows.

    Raises:
        ConfigurationError: If a value of the config differs from the argument for it.
        UnsupportedError: If the config has its own optimizer or schedule.
    """
    given: Any = args.deepspeed
    plugin = given if isinstance(given, DeepSpeedPlugin) else DeepSpeedPlugin(given)
    _check_optimizer(plugin, args)
    _check_schedule(plugin, args)
    config = plugin.hf_ds_config
    values = training_values(
        micro_batch_size=args.train_batch_size_for(num_processes),
        accumulation_steps=args.gradient_accumulation_steps or 1 if args.global_batch_size is None else None,
        num_processes=num_processes,
        gradient_clipping=args.max_grad_norm or 0.0,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
    )
    betas = args.optimizer_kwargs.get("betas", (0.9, 0.999))
    values |= {"optimizer.params.betas": list(betas), "optimizer.params.eps": args.optimizer_kwargs.get("eps", 1e-8)}
    known = {key: value for key, value in values.items() if config.get_value(key) is not None}
    # The sizes of buckets follow from the model, and the precision from `mixed_precision`: they stay "auto".
    for key, value in values_of(plugin.deepspeed_config):
        if value == AUTO:
            known.setdefault(key, AUTO)
    plugin.deepspeed_config_process("", None, None, True, **known)
    return plugin


def _check_optimizer(plugin: DeepSpeedPlugin, args: TrainingArguments) -> None:
    kind = plugin.get_value("optimizer.type")
    if kind is None:
        return
    if str(kind).lower() not in _OPTIMIZERS.get(args.optimizer, ()):
        raise UnsupportedError(
            f"optimizer.type is {kind!r} in the DeepSpeed config and optimizer={args.optimizer!r} in the arguments, "
            "which make the optimizer. Give the same optimizer there, or remove the section `optimizer`."
        )
    known = ("lr", "weight_decay", "betas", "eps", *_IMPLEMENTATION)
    others = [name for name in plugin.get_value("optimizer.params", {}) if name not in known]
    if others:
        raise UnsupportedError(
            f"optimizer.params.{others[0]} in the DeepSpeed config is not known here. Give "
            f"TrainingArguments(optimizer_kwargs={{{others[0]!r}: …}}), and remove it from the config."
        )


def _check_schedule(plugin: DeepSpeedPlugin, args: TrainingArguments) -> None:
    kind = plugin.get_value("scheduler.type")
    if kind is None:
        return
    if kind != _SCHEDULES.get(args.lr_scheduler):
        raise ConfigurationError(
            f"scheduler.type is {kind!r} in the DeepSpeed config and lr_scheduler={args.lr_scheduler!r} in the "
            f"arguments, which make the schedule. These are alike: "
            f"{', '.join(f'{theirs} and {ours!r}' for ours, theirs in _SCHEDULES.items())}. Change one of them, or "
            "remove the section `scheduler`."
        )
    params = plugin.get_value("scheduler.params", {})
    fixed = [name for name, value in params.items() if value != AUTO]
    if fixed:
        raise ConfigurationError(
            f"scheduler.params.{fixed[0]} is {params[fixed[0]]!r} in the DeepSpeed config, and the schedule is made "
            'from lr_scheduler and warmup_steps of the arguments. Give it there, and write "auto" into the config.'
        )
