"""The checks of `TrainingArguments`: the values each argument allows, and arguments that contradict each other."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean, nearest, unknown
from trainer_lib.foundation.metric_names import greater_is_better_for
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.precision_options import check_precision
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments import value_types as values
from trainer_lib.trainer.arguments.value_types import NEVER, Check, optional
from trainer_lib.trainer.checks.foreign_names import OF_LAUNCHERS
from trainer_lib.trainer.huggingface.argument_conversion import convert, explain, is_foreign, renamed
from trainer_lib.trainer.optim.optimizers import optimizer_names
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup
from trainer_lib.trainer.optim.schedules import NAMES as SCHEDULES

if TYPE_CHECKING:
    from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

_NO_LIMIT = " For no limit, leave it out."


def _optimizer(name: str, value: Any) -> str:
    kept = values.name_of("optimizer")(name, value)
    # "lbfgs" passes here: building the optimizer refuses it with a reason.
    if "." in kept or kept.lower() in (*optimizer_names(), "lbfgs"):
        return kept
    raise ConfigurationError(_hugging_face_hint("optim", kept, name) or _unknown_name(name, kept, optimizer_names()))


def _schedule_name(name: str, value: Any) -> str:
    kept = values.name_of("scheduler")(name, value)
    if "." in kept or kept in SCHEDULES:
        return kept
    raise ConfigurationError(
        _hugging_face_hint("lr_scheduler_type", kept, name) or _unknown_name(name, kept, SCHEDULES)
    )


def _precision(name: str, value: Any) -> str:
    return check_precision(value, name)


def _sharding_plugin(name: str, value: Any) -> Any:
    if isinstance(value, (str, list)):  # Hugging Face's form
        raise ConfigurationError(explain({name: value})[0])
    return values.kind(FullyShardedDataParallelPlugin, or_flag=True)(name, value)


def _hugging_face_hint(theirs: str, value: str, ours: str) -> str | None:
    """Return what to give instead of a name of Hugging Face's; `None` if it is not one of theirs either."""
    converted, _ = convert({theirs: value}, set())
    return None if converted.get(ours, value) == value else explain({theirs: value})[0]


def _unknown_name(name: str, value: str, known: Iterable[str]) -> str:
    return unknown(name, value, known) + " Or give a dotted path."


CHECKS: dict[str, Check] = {
    "output_dir": optional(values.folder),
    "run_name": optional(values.folder_name),
    "resume": values.resume,
    "seed": optional(values.whole(at_least=0, below=2**32)),
    "data_seed": optional(values.whole(at_least=0, below=2**32)),
    "num_train_epochs": optional(values.number(above=0, hint=_NO_LIMIT)),
    "max_steps": optional(values.whole(hint=_NO_LIMIT)),
    "max_tokens": optional(values.tokens),
    "max_time": optional(values.duration),
    "deadline": optional(values.moment),
    "stop_signals": values.signals,
    "per_device_train_batch_size": values.batch_size,
    "per_device_eval_batch_size": optional(values.eval_batch_size),
    "gradient_accumulation_steps": optional(values.whole(hint=" For no accumulation, leave it out.")),
    "global_batch_size": optional(values.whole()),
    "learning_rate": values.number(at_least=0),
    "optimizer": _optimizer,
    "optimizer_kwargs": values.keywords,
    "weight_decay": values.number(at_least=0),
    "parameter_groups": values.objects(ParameterGroup),
    "lr_scheduler": _schedule_name,
    "lr_scheduler_kwargs": values.keywords,
    "warmup": optional(values.warmup),
    "schedule_steps": optional(values.whole()),
    "max_grad_norm": optional(values.number(above=0, hint=" To leave gradients as they are, give None.")),
    "mixed_precision": optional(_precision),
    "compile": values.compilation,
    "gradient_checkpointing": values.flag,
    "fsdp": optional(_sharding_plugin),
    "parallelism": optional(values.kind(ParallelismConfig)),
    "ddp": optional(values.kind(DistributedDataParallelKwargs)),
    "sync_batchnorm": values.flag,
    "tf32": optional(values.flag),
    "deterministic": values.flag,
    "detect_anomaly": values.flag,
    "gc_every": optional(values.amount),
    "use_cpu": values.flag,
    "log_every": values.interval,
    "eval_every": optional(values.intervals),
    "eval_delay": optional(values.counted_amount),
    "eval_on_start": values.flag,
    "save_every": optional(values.interval),
    "save_in_background": values.flag,
    "on_save_error": values.choice("continue", "raise"),
    "on_exception": values.choice("save", "raise"),
    "on_nonfinite": values.choice("raise", "skip", "rewind"),
    "max_nonfinite": values.whole(hint=' For none, give on_nonfinite="raise".'),
    "loss_spike": optional(values.number(above=1)),
    "hang_timeout": optional(values.duration),
    "keep_last": optional(values.whole(hint=" To keep all, give None.")),
    "keep_best": values.whole(at_least=0),
    "keep_every": optional(values.amount),
    "metric_for_best": optional(values.text),
    "greater_is_better": optional(values.flag),
    "load_best_at_end": values.flag,
    "shuffle": values.flag,
    "num_workers": values.whole(at_least=0),
    "pin_memory": optional(values.flag),
    "prefetch_factor": optional(values.whole()),
    "persistent_workers": values.flag,
    "seed_each_sample": values.flag,
    "drop_last": values.flag,
    "group_by_length": values.flag,
    "remove_unused_columns": values.flag,
    "length_column": values.text,
    "sample_weights": optional(values.weights),
    "validation_split": optional(values.share),
    "on_bad_sample": values.choice("raise", "skip"),
    "max_bad_samples": values.count_or_share(hint=' For none, give on_bad_sample="raise".'),
    "limit_train_batches": optional(values.whole(hint=_NO_LIMIT)),
    "limit_eval_batches": optional(values.whole(hint=_NO_LIMIT)),
    "overfit_batches": optional(values.whole()),
    "dry_run": values.flag,
    "label_names": optional(values.texts),
    "predict_with_generate": values.flag,
    "generation_kwargs": values.keywords,
    "progress_bar": optional(values.flag),
    "report_to": values.reports,
}


def check_names(cls: type, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise for names that are not arguments of `cls`, each with what to give instead."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    if positional:
        raise ConfigurationError(
            f"{cls.__name__} takes arguments by name only, got {positional[0]!r}."
            + (f" Give output_dir={positional[0]!r}." if isinstance(positional[0], str) else "")
        )
    unknown_names = {name: value for name, value in named.items() if name not in known}
    messages = [_unknown(cls, name, value, known) for name, value in unknown_names.items() if not is_foreign(name)]
    foreign = [name for name in unknown_names if is_foreign(name)]
    if unknown_names:
        raise ConfigurationError("\n".join([*messages, *explain(named, foreign)]))


def check_values(arguments: Any) -> None:
    """Raise for a value that is not allowed, and store each value in its plain form."""
    for name, check in CHECKS.items():
        setattr(arguments, name, check(name, getattr(arguments, name)))


def check_consistency(arguments: "TrainingArguments") -> None:
    """Raise if arguments contradict each other, or if one has no effect because of another."""
    for check in _CONSISTENCY_CHECKS:
        check(arguments)


def _unknown(cls: type, name: str, value: Any, known: list[str]) -> str:
    message = f"{cls.__name__} has no argument {name!r} (given: {shown(value)})."
    if name in OF_LAUNCHERS:
        return f"{message} Give it to the launcher, before the script: trainer-lib launch --num_processes N script.py."
    closest = renamed(name)
    hint = f" Did you mean {closest!r}?" if closest else did_you_mean(name, known)
    near = ", ".join(nearest(name, known))
    return message + (hint or f" The nearest names are {near}; help({cls.__name__}) lists all {len(known)}.")


def _batch_size(args: "TrainingArguments") -> None:
    size, whole = args.per_device_train_batch_size, args.global_batch_size
    if whole is None:
        return
    if args.gradient_accumulation_steps is not None:
        raise ConfigurationError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and global_batch_size={whole} set the "
            "same thing. Give one of them."
        )
    if isinstance(size, int) and whole % size:
        below, above = whole // size * size, (whole // size + 1) * size
        raise ConfigurationError(
            f"global_batch_size={whole} must be a multiple of per_device_train_batch_size={size}. Give "
            f"{f'{below} or {above}' if below else above}, or another per_device_train_batch_size."
        )


def _files(args: "TrainingArguments") -> None:
    if args.keep_every is not None and args.keep_last is None:
        raise ConfigurationError(
            f"keep_every={args.keep_every!r} has no effect with keep_last=None, which keeps all. Give one of them."
        )
    if args.output_dir is not None:
        return
    if args.resume in ("auto", "extend"):
        raise ConfigurationError(
            f'resume="{args.resume}" looks for a run in output_dir, which is not set. Give output_dir.'
        )
    if args.save_every not in (None, NEVER):
        raise ConfigurationError(
            f"save_every={args.save_every!r} saves checkpoints in output_dir, which is not set. Give output_dir."
        )
    if args.load_best_at_end:
        raise ConfigurationError(
            "load_best_at_end=True loads a checkpoint of output_dir, which is not set. Give output_dir."
        )


def _delay(args: "TrainingArguments") -> None:
    if args.eval_delay is not None and args.eval_every == NEVER:
        raise ConfigurationError(
            f'eval_delay={args.eval_delay!r} has no effect with eval_every="never". Leave one of them out.'
        )


def _best(args: "TrainingArguments") -> None:
    if args.load_best_at_end and args.keep_best == 0:
        raise ConfigurationError(
            "load_best_at_end=True needs the best checkpoint, and keep_best=0 deletes it. Leave keep_best out."
        )
    if args.load_best_at_end and args.eval_every == NEVER and not args.eval_on_start:
        raise ConfigurationError(
            'load_best_at_end=True needs evaluations to rank checkpoints, and eval_every="never" makes none. Leave '
            "eval_every out."
        )
    if args.metric_for_best is not None:
        greater_is_better_for(args.metric_for_best, args.greater_is_better)
    elif args.greater_is_better is not None:
        raise ConfigurationError(
            f"greater_is_better={args.greater_is_better} has no effect without metric_for_best. Give "
            'metric_for_best="eval_…".'
        )


def _optimizer_options(args: "TrainingArguments") -> None:
    for name, arguments in (
        ("optimizer_kwargs", {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "parameter_groups"}),
        ("lr_scheduler_kwargs", {"num_warmup_steps": "warmup", "num_training_steps": "schedule_steps"}),
    ):
        for key in set(getattr(args, name)) & set(arguments):
            raise ConfigurationError(
                f"{name} has {key!r}, which {arguments[key]} sets. Give {arguments[key]}, and leave it out of {name}."
            )


def _schedule(args: "TrainingArguments") -> None:
    name = "max_steps" if args.schedule_steps is None else "schedule_steps"
    steps = getattr(args, name)
    if steps is not None and args.warmup_steps_for(steps) > steps:
        raise ConfigurationError(
            f"warmup={args.warmup!r} must not be longer than {name}={steps}. Give a shorter warmup or more steps."
        )


def _order(args: "TrainingArguments") -> None:
    chosen = [name for name in ("group_by_length", "sample_weights") if getattr(args, name)]
    if len(chosen) == 2:
        raise ConfigurationError(
            "group_by_length and sample_weights both choose the samples of a batch. Give one of them."
        )
    if args.validation_split is not None and args.sample_weights:
        raise ConfigurationError(
            "validation_split removes rows from train_dataset, and sample_weights has a weight for each row. Split the "
            "data yourself, and give eval_dataset."
        )
    if chosen and not args.shuffle:
        raise ConfigurationError(
            f"shuffle=False keeps the order of the data, which {chosen[0]} changes. Give one of them."
        )
    if args.overfit_batches is None:
        return
    for name in ("limit_train_batches", "limit_eval_batches", *chosen):
        if getattr(args, name) is not None:
            raise ConfigurationError(
                f"overfit_batches={args.overfit_batches} and {name} both choose the batches. Give one of them."
            )


def _workers(args: "TrainingArguments") -> None:
    for name, unset in (("prefetch_factor", None), ("persistent_workers", False)):
        if args.num_workers == 0 and getattr(args, name) != unset:
            raise ConfigurationError(
                f"{name}={getattr(args, name)} has no effect with num_workers=0. Give num_workers=1 or more."
            )


def _device(args: "TrainingArguments") -> None:
    for name in ("tf32", "pin_memory"):
        if args.use_cpu and getattr(args, name):
            raise ConfigurationError(f"{name}=True has no effect with use_cpu=True. Give one of them.")


def _splitting(args: "TrainingArguments") -> None:
    if args.per_device_train_batch_size != values.AUTO:
        return
    for setting, reason in (
        (args.fsdp and "fsdp", "all ranks of a sharded model compute together"),
        (args.sync_batchnorm and "sync_batchnorm=True", "BatchNorm waits for the other ranks in each forward pass"),
    ):
        if setting:
            raise ConfigurationError(
                f'per_device_train_batch_size="auto" splits the batches of each rank separately, which {setting} does '
                f"not allow: {reason}. Give a number."
            )


def _sharding(args: "TrainingArguments") -> None:
    if not args.fsdp:
        return
    if args.ddp is not None:
        raise ConfigurationError(
            "fsdp and ddp are both given: a model is either sharded or replicated. Give one of them."
        )
    if args.gradient_checkpointing and getattr(args.fsdp, "activation_checkpointing", False):
        raise ConfigurationError(
            "gradient_checkpointing=True and fsdp.activation_checkpointing=True set the same thing. Give one of them."
        )


def _generation(args: "TrainingArguments") -> None:
    if args.generation_kwargs and not args.predict_with_generate:
        raise ConfigurationError(
            "generation_kwargs has no effect with predict_with_generate=False. Give predict_with_generate=True."
        )


_CONSISTENCY_CHECKS: tuple[Callable[["TrainingArguments"], None], ...] = (
    _batch_size,
    _files,
    _delay,
    _best,
    _optimizer_options,
    _schedule,
    _order,
    _workers,
    _device,
    _splitting,
    _sharding,
    _generation,
)
