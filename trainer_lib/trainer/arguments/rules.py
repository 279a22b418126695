"""Rules for arguments that contradict each other, or of which one has no effect because of another.

A rule takes the arguments it relates as its parameters, by their names.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.foundation.duration import NEVER
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import greater_is_better_for
from trainer_lib.options.memory_options import check_checkpointing, check_one_checkpointing
from trainer_lib.trainer.arguments import value_checks as checks
from trainer_lib.trainer.optim.optimizer_packages import steps_in_backward

Rule = Callable[..., None]

RULES: dict[Rule, tuple[str, ...]] = {}


def check_rules(arguments: Any) -> None:
    """Raise if arguments contradict each other."""
    for check, names in RULES.items():
        check(*(getattr(arguments, name) for name in names))


def _rule(check: Rule) -> Rule:
    RULES[check] = check.__code__.co_varnames[: check.__code__.co_argcount]
    return check


@_rule
def _batch_size(
    per_device_train_batch_size: int | str, gradient_accumulation_steps: int | None, global_batch_size: int | None
) -> None:
    size, whole = per_device_train_batch_size, global_batch_size
    if whole is None:
        return
    if gradient_accumulation_steps is not None:
        raise ConfigurationError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} and global_batch_size={whole} set the same "
            "thing. Give one of them."
        )
    if isinstance(size, int) and whole % size:
        below, above = whole // size * size, (whole // size + 1) * size
        raise ConfigurationError(
            f"global_batch_size={whole} must be a multiple of per_device_train_batch_size={size}. Give "
            f"{f'{below} or {above}' if below else above}, or another per_device_train_batch_size."
        )


@_rule
def _retention(keep_every: Any, keep_last: int | None) -> None:
    if keep_every is not None and keep_last is None:
        raise ConfigurationError(
            f"keep_every={keep_every!r} has no effect with keep_last=None, which keeps all. Give one of them."
        )


@_rule
def _folder(output_dir: str | None, resume: str, save_every: Any, load_best_at_end: bool) -> None:
    if output_dir is not None:
        return
    if resume in ("auto", "extend"):
        raise ConfigurationError(f'resume="{resume}" looks for a run in output_dir, which is not set. Give output_dir.')
    if save_every not in (None, NEVER):
        raise ConfigurationError(
            f"save_every={save_every!r} saves checkpoints in output_dir, which is not set. Give output_dir."
        )
    if load_best_at_end:
        raise ConfigurationError(
            "load_best_at_end=True loads a checkpoint of output_dir, which is not set. Give output_dir."
        )


@_rule
def _delay(eval_delay: Any, eval_every: Any) -> None:
    if eval_delay is not None and eval_every == NEVER:
        raise ConfigurationError(
            f'eval_delay={eval_delay!r} has no effect with eval_every="never". Leave one of them out.'
        )


@_rule
def _best(load_best_at_end: bool, keep_best: int, eval_every: Any, eval_on_start: bool) -> None:
    if load_best_at_end and keep_best == 0:
        raise ConfigurationError(
            "load_best_at_end=True needs the best checkpoint, and keep_best=0 deletes it. Leave keep_best out."
        )
    if load_best_at_end and eval_every == NEVER and not eval_on_start:
        raise ConfigurationError(
            'load_best_at_end=True needs evaluations to rank checkpoints, and eval_every="never" makes none. Leave '
            "eval_every out."
        )


@_rule
def _metric(metric_for_best: str | None, greater_is_better: bool | None) -> None:
    if metric_for_best is not None:
        greater_is_better_for(metric_for_best, greater_is_better)
    elif greater_is_better is not None:
        raise ConfigurationError(
            f"greater_is_better={greater_is_better} has no effect without metric_for_best. Give "
            'metric_for_best="eval_…".'
        )


@_rule
def _optimizer_options(optimizer_kwargs: Mapping[str, Any], lr_scheduler_kwargs: Mapping[str, Any]) -> None:
    of_optimizer = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "parameter_groups"}
    of_schedule = {"num_warmup_steps": "warmup", "num_training_steps": "schedule_steps"}
    for name, options, arguments in (
        ("optimizer_kwargs", optimizer_kwargs, of_optimizer),
        ("lr_scheduler_kwargs", lr_scheduler_kwargs, of_schedule),
    ):
        for key in set(options) & set(arguments):
            raise ConfigurationError(
                f"{name} has {key!r}, which {arguments[key]} sets. Give {arguments[key]}, and leave it out of {name}."
            )


@_rule
def _warmup(warmup: Any, max_steps: int | None, schedule_steps: int | None) -> None:
    name, steps = ("max_steps", max_steps) if schedule_steps is None else ("schedule_steps", schedule_steps)
    if steps is not None and checks.warmup_steps(warmup, steps) > steps:
        raise ConfigurationError(
            f"warmup={warmup!r} must not be longer than {name}={steps}. Give a shorter warmup or more steps."
        )


@_rule
def _order(group_by_length: bool, sample_weights: Any, validation_split: float | None, shuffle: bool) -> None:
    if group_by_length and sample_weights:
        raise ConfigurationError(
            "group_by_length and sample_weights both choose the samples of a batch. Give one of them."
        )
    if validation_split is not None and sample_weights:
        raise ConfigurationError(
            "validation_split removes rows from train_dataset, and sample_weights has a weight for each row. Split the "
            "data yourself, and give eval_dataset."
        )
    if (group_by_length or sample_weights) and not shuffle:
        name = "group_by_length" if group_by_length else "sample_weights"
        raise ConfigurationError(f"shuffle=False keeps the order of the data, which {name} changes. Give one of them.")


@_rule
def _overfitting(
    overfit_batches: int | None,
    limit_train_batches: int | None,
    limit_eval_batches: int | None,
    group_by_length: bool,
    sample_weights: Any,
) -> None:
    others = {
        "limit_train_batches": limit_train_batches,
        "limit_eval_batches": limit_eval_batches,
        "group_by_length": group_by_length,
        "sample_weights": sample_weights,
    }
    other = next((name for name, value in others.items() if value), None)
    if overfit_batches is not None and other is not None:
        raise ConfigurationError(
            f"overfit_batches={overfit_batches} and {other} both choose the batches. Give one of them."
        )


@_rule
def _workers(num_workers: int | str, prefetch_factor: int | None, persistent_workers: bool) -> None:
    for name, value, unset in (
        ("prefetch_factor", prefetch_factor, None),
        ("persistent_workers", persistent_workers, False),
    ):
        if num_workers == 0 and value != unset:
            raise ConfigurationError(f"{name}={value} has no effect with num_workers=0. Give num_workers=1 or more.")


@_rule
def _low_memory_shuffle(low_memory_shuffle: bool, shuffle: bool, group_by_length: bool, sample_weights: Any) -> None:
    others = {
        "shuffle=False": not shuffle,
        "group_by_length=True": group_by_length,
        "sample_weights": sample_weights is not None,
    }
    other = next((name for name, is_set in others.items() if is_set), None)
    if low_memory_shuffle and other is not None:
        raise ConfigurationError(
            f"low_memory_shuffle=True has no effect with {other}, which sets another order. Give one of them."
        )


@_rule
def _device(use_cpu: bool, tf32: bool | None, pin_memory: bool | None) -> None:
    for name, value in (("tf32", tf32), ("pin_memory", pin_memory)):
        if use_cpu and value:
            raise ConfigurationError(f"{name}=True has no effect with use_cpu=True. Give one of them.")


@_rule
def _splitting(per_device_train_batch_size: int | str, fsdp: Any, deepspeed: Any, sync_batchnorm: bool) -> None:
    if per_device_train_batch_size != checks.AUTO:
        return
    for setting, reason in (
        (fsdp and "fsdp", "all ranks of a sharded model compute together"),
        (deepspeed and "deepspeed", "all ranks of a sharded model compute together"),
        (sync_batchnorm and "sync_batchnorm=True", "BatchNorm waits for the other ranks in each forward pass"),
    ):
        if setting:
            raise ConfigurationError(
                f'per_device_train_batch_size="auto" splits the batches of each rank separately, which {setting} does '
                f"not allow: {reason}. Give a number."
            )


@_rule
def _local_training(
    local_sgd_steps: int | None,
    outer_learning_rate: float | None,
    outer_momentum: float | None,
    per_device_train_batch_size: int | str,
    on_nonfinite: str,
    fsdp: Any,
    deepspeed: Any,
) -> None:
    if local_sgd_steps is None and outer_learning_rate is not None:
        raise ConfigurationError(
            f"outer_learning_rate={outer_learning_rate} has no effect without local_sgd_steps. Give local_sgd_steps."
        )
    if outer_learning_rate is None and outer_momentum is not None:
        raise ConfigurationError(
            f"outer_momentum={outer_momentum} has no effect without outer_learning_rate. Give outer_learning_rate."
        )
    if outer_momentum is not None and outer_momentum >= 1:
        raise ConfigurationError(f"outer_momentum must be less than 1 (got {outer_momentum}), such as 0.9.")
    if local_sgd_steps is None:
        return
    for setting, reason in (
        (per_device_train_batch_size == checks.AUTO and 'per_device_train_batch_size="auto"', "splits batches"),
        (on_nonfinite == "rewind" and 'on_nonfinite="rewind"', "goes back"),
        (fsdp and "fsdp", "computes"),
        (deepspeed and "deepspeed", "computes"),
    ):
        if setting:
            raise ConfigurationError(
                f"local_sgd_steps={local_sgd_steps} lets each rank train by itself, and {setting} {reason} together "
                "with the other ranks. Give one of them."
            )


@_rule
def _sharding(fsdp: Any, ddp: Any, gradient_checkpointing: bool, activation_offload: bool) -> None:
    if not fsdp:
        return
    if ddp is not None:
        raise ConfigurationError(
            "fsdp and ddp are both given: a model is either sharded or replicated. Give one of them."
        )
    if getattr(fsdp, "activation_checkpointing", False):
        check_one_checkpointing(gradient_checkpointing, activation_offload, "fsdp.activation_checkpointing=True")


@_rule
def _checkpointed_blocks(
    gradient_checkpointing_every: int, gradient_checkpointing_policy: Any, gradient_checkpointing: bool
) -> None:
    check_checkpointing(gradient_checkpointing, gradient_checkpointing_every, gradient_checkpointing_policy)


@_rule
def _optimizer_in_backward(
    optimizer: str,
    optimizer_in_backward: bool,
    max_grad_norm: float | None,
    gradient_accumulation_steps: int | None,
    per_device_train_batch_size: int | str,
    mixed_precision: str | None,
    on_nonfinite: str,
    loss_spike: float | None,
    ddp: Any,
    deepspeed: Any,
) -> None:
    if not (optimizer_in_backward or steps_in_backward(optimizer)):
        return
    option = f"optimizer={optimizer!r}" if steps_in_backward(optimizer) else "optimizer_in_backward=True"
    other = "take another optimizer" if steps_in_backward(optimizer) else "leave optimizer_in_backward out"
    steps, is_split = gradient_accumulation_steps or 1, per_device_train_batch_size == checks.AUTO
    for setting, reason, remedy in (
        (
            max_grad_norm is not None and f"max_grad_norm={max_grad_norm}",
            "clipping needs the norm of all gradients before the first update",
            "max_grad_norm=None",
        ),
        (steps > 1 and f"gradient_accumulation_steps={steps}", "no gradients stay to add to", "1, with larger batches"),
        (is_split and 'per_device_train_batch_size="auto"', "parts of a batch add up gradients", "a number"),
        (mixed_precision == "fp16" and "mixed_precision='fp16'", "its scaler waits for all gradients", "'bf16'"),
        (
            on_nonfinite != "raise" and f'on_nonfinite="{on_nonfinite}"',
            "NaN is found when other weights are updated already",
            'on_nonfinite="raise"',
        ),
        (loss_spike is not None and f"loss_spike={loss_spike}", "a spike is found after the update", "loss_spike=None"),
        (ddp and "ddp", "DDP keeps gradients in its buckets", "fsdp=True instead"),
        (deepspeed and "deepspeed", "DeepSpeed steps by itself", "fsdp=True instead"),
    ):
        if setting:
            raise ConfigurationError(f"{option} does not work with {setting}: {reason}. Give {remedy}, or {other}.")


@_rule
def _deepspeed(deepspeed: Any, fsdp: Any, ddp: Any) -> None:
    if deepspeed is None:
        return
    for name, value in (("fsdp", fsdp), ("ddp", ddp)):
        if value:
            raise ConfigurationError(
                f"deepspeed and {name} are both given, and each says how ranks share the model. Give one of them."
            )


@_rule
def _chunked_loss(
    chunked_cross_entropy: bool, use_liger_kernel: bool, mixed_precision: str | None, compile: Any, parallelism: Any
) -> None:
    if not chunked_cross_entropy:
        return
    sizes = {name: getattr(parallelism, "sizes", {}).get(name, 1) for name in ("tp", "pp")}
    for setting, reason in (
        (use_liger_kernel and "use_liger_kernel=True", "has a loss of that kind itself"),
        (compile and "compile", "would make one graph of all parts"),
        (mixed_precision == "fp16" and "mixed_precision='fp16'", "scales the loss after its gradients are computed"),
        *((size > 1 and f"{name}_size={size}", "splits the output layer") for name, size in sizes.items()),
    ):
        if setting:
            raise ConfigurationError(
                f"chunked_cross_entropy=True does not work with {setting}, which {reason}. Give one of them."
            )


@_rule
def _device_map(device_map: Any, max_memory: Any, offload_folder: str | None, fsdp: Any, parallelism: Any) -> None:
    if device_map is not None:
        for name, value in (("fsdp", fsdp), ("parallelism", parallelism)):
            if value:
                raise ConfigurationError(
                    f"device_map and {name} are both given: a device map is for one process. Give one of them."
                )
    if max_memory is not None and not isinstance(device_map, str):
        raise ConfigurationError('max_memory has no effect unless device_map is inferred. Give device_map="auto".')
    if offload_folder is not None and device_map is None:
        raise ConfigurationError('offload_folder has no effect without device_map. Give device_map="auto".')


@_rule
def _generation(generation_kwargs: Mapping[str, Any], predict_with_generate: bool, parallelism: Any) -> None:
    if generation_kwargs and not predict_with_generate:
        raise ConfigurationError(
            "generation_kwargs has no effect with predict_with_generate=False. Give predict_with_generate=True."
        )
    stages = getattr(parallelism, "sizes", {}).get("pp", 1)
    if predict_with_generate and stages > 1:
        raise ConfigurationError(
            f"predict_with_generate=True does not work with pp_size={stages}: no rank of a pipeline has the whole "
            "model. Leave one of them out, or split the model by tp_size."
        )
