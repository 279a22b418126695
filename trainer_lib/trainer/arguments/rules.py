"""This file is what `TrainingArguments` allows: for each argument its kind of values, and which of them contradict."""

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
    # "lbfgs" is known, and refused with a reason where it is made.
    if "." in kept or kept.lower() in (*optimizer_names(), "lbfgs"):
        return kept
    raise ConfigurationError(_as_foreign("optim", kept, name) or _unknown_name(name, kept, optimizer_names()))


def _schedule_name(name: str, value: Any) -> str:
    kept = values.name_of("scheduler")(name, value)
    if "." in kept or kept in SCHEDULES:
        return kept
    raise ConfigurationError(_as_foreign("lr_scheduler_type", kept, name) or _unknown_name(name, kept, SCHEDULES))


def _precision(name: str, value: Any) -> str:
    return check_precision(value, name)


def _sharding_plugin(name: str, value: Any) -> Any:
    if isinstance(value, (str, list)):  # Hugging Face's form
        raise ConfigurationError(explain({name: value})[0])
    return values.kind(FullyShardedDataParallelPlugin, or_flag=True)(name, value)


def _as_foreign(theirs: str, value: str, ours: str) -> str | None:
    """Return what to give for a name that Hugging Face has for it; none, if that has none either."""
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


def check_names(cls: type, positional: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise for names that are no arguments of `cls`, each with what to say in its place."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    if positional:
        raise ConfigurationError(
            f"{cls.__name__} takes arguments by name only, got {positional[0]!r}."
            + (f" Give output_dir={positional[0]!r}." if isinstance(positional[0], str) else "")
        )
    strange = {name: value for name, value in given.items() if name not in known}
    said = [_unknown(cls, name, value, known) for name, value in strange.items() if not is_foreign(name)]
    foreign = [name for name in strange if is_foreign(name)]
    if strange:
        raise ConfigurationError("\n".join([*said, *explain(given, foreign)]))


def check_values(arguments: Any) -> None:
    """Raise for a value that is not allowed, and keep each in its plain form."""
    for name, check in CHECKS.items():
        setattr(arguments, name, check(name, getattr(arguments, name)))


def check_agreement(arguments: "TrainingArguments") -> None:
    """Raise where arguments contradict each other, or say something about what another one rules out."""
    for check in _AGREEMENTS:
        check(arguments)


def _unknown(cls: type, name: str, value: Any, known: list[str]) -> str:
    said = f"{cls.__name__} has no argument {name!r} (given: {shown(value)})."
    if name in OF_LAUNCHERS:
        return f"{said} It is for the launcher, before the script: trainer-lib launch --num_processes N script.py."
    closest = renamed(name)
    hint = f" Did you mean {closest!r}?" if closest else did_you_mean(name, known)
    near = ", ".join(nearest(name, known))
    return said + (hint or f" The nearest are {near}; help({cls.__name__}) lists all {len(known)}.")


def _batch_size(args: "TrainingArguments") -> None:
    size, whole = args.per_device_train_batch_size, args.global_batch_size
    if whole is None:
        return
    if args.gradient_accumulation_steps is not None:
        raise ConfigurationError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and global_batch_size={whole} say the "
            "same in two ways. Give one of them."
        )
    if isinstance(size, int) and whole % size:
        below, above = whole // size * size, (whole // size + 1) * size
        raise ConfigurationError(
            f"global_batch_size={whole} is no multiple of per_device_train_batch_size={size}. Give "
            f"{f'{below} or {above}' if below else above}, or another per_device_train_batch_size."
        )


def _files(args: "TrainingArguments") -> None:
    if args.keep_every is not None and args.keep_last is None:
        raise ConfigurationError(
            f"keep_every={args.keep_every!r} says nothing where keep_last=None keeps all. Give one of them."
        )
    if args.output_dir is not None:
        return
    if args.resume in ("auto", "extend"):
        raise ConfigurationError(
            f'resume="{args.resume}" looks for a run in output_dir, and there is none. Give output_dir.'
        )
    if args.save_every not in (None, NEVER):
        raise ConfigurationError(f"save_every={args.save_every!r} says when, and nothing says where. Give output_dir.")
    if args.load_best_at_end:
        raise ConfigurationError(
            "load_best_at_end=True loads a checkpoint, and without output_dir none is saved. Give output_dir."
        )


def _delay(args: "TrainingArguments") -> None:
    if args.eval_delay is not None and args.eval_every == NEVER:
        raise ConfigurationError(
            f'eval_delay={args.eval_delay!r} delays evaluations, and eval_every="never" makes none. Leave one of them '
            "out."
        )


def _best(args: "TrainingArguments") -> None:
    if args.load_best_at_end and args.keep_best == 0:
        raise ConfigurationError("load_best_at_end=True and keep_best=0: the best is not kept. Leave keep_best out.")
    if args.load_best_at_end and args.eval_every == NEVER and not args.eval_on_start:
        raise ConfigurationError(
            'load_best_at_end=True and eval_every="never": nothing tells which is the best. Leave eval_every out.'
        )
    if args.metric_for_best is not None:
        greater_is_better_for(args.metric_for_best, args.greater_is_better)
    elif args.greater_is_better is not None:
        raise ConfigurationError(
            f"greater_is_better={args.greater_is_better} says nothing without metric_for_best. Give "
            'metric_for_best="eval_…".'
        )


def _one_knob(args: "TrainingArguments") -> None:
    for name, elsewhere in (
        ("optimizer_kwargs", {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "parameter_groups"}),
        ("lr_scheduler_kwargs", {"num_warmup_steps": "warmup", "num_training_steps": "schedule_steps"}),
    ):
        for key in set(getattr(args, name)) & set(elsewhere):
            raise ConfigurationError(
                f"{name} has {key!r}, which is said by {elsewhere[key]}. Give {elsewhere[key]}, and leave it out there."
            )


def _schedule(args: "TrainingArguments") -> None:
    name = "max_steps" if args.schedule_steps is None else "schedule_steps"
    steps = getattr(args, name)
    if steps is not None and args.warmup_steps_for(steps) > steps:
        raise ConfigurationError(f"warmup={args.warmup!r} is longer than all of {name}={steps}.")


def _order(args: "TrainingArguments") -> None:
    told = [name for name in ("group_by_length", "sample_weights") if getattr(args, name)]
    if len(told) == 2:
        raise ConfigurationError("group_by_length and sample_weights each choose the samples of a batch. Give one.")
    if args.validation_split is not None and args.sample_weights:
        raise ConfigurationError(
            "validation_split takes rows out of train_dataset, and sample_weights has a weight for each row. Split the "
            "data, and give eval_dataset."
        )
    if told and not args.shuffle:
        raise ConfigurationError(f"shuffle=False keeps the order, and {told[0]} chooses another. Give one of them.")
    if args.overfit_batches is None:
        return
    for name in ("limit_train_batches", "limit_eval_batches", *told):
        if getattr(args, name) is not None:
            raise ConfigurationError(
                f"overfit_batches={args.overfit_batches} says which batches are taken, and so does {name}. Give one of "
                "them."
            )


def _workers(args: "TrainingArguments") -> None:
    for name, unset in (("prefetch_factor", None), ("persistent_workers", False)):
        if args.num_workers == 0 and getattr(args, name) != unset:
            raise ConfigurationError(
                f"{name}={getattr(args, name)} is about workers, and num_workers=0 has none. Give num_workers=1 or "
                "more."
            )


def _device(args: "TrainingArguments") -> None:
    for name in ("tf32", "pin_memory"):
        if args.use_cpu and getattr(args, name):
            raise ConfigurationError(f"{name}=True is about accelerators, and use_cpu=True takes none. Give one.")


def _splitting(args: "TrainingArguments") -> None:
    if args.per_device_train_batch_size != values.AUTO:
        return
    for given, why in (
        (args.fsdp and "fsdp", "the processes of a sharded model compute all together"),
        (args.sync_batchnorm and "sync_batchnorm=True", "BatchNorm waits for the other processes in each forward"),
    ):
        if given:
            raise ConfigurationError(
                f'per_device_train_batch_size="auto" has each process compute its batch in parts of its own, and with '
                f"{given} {why}. Give a number."
            )


def _sharding(args: "TrainingArguments") -> None:
    if not args.fsdp:
        return
    if args.ddp is not None:
        raise ConfigurationError("fsdp and ddp are both given: a model is sharded or replicated. Give one of them.")
    if args.gradient_checkpointing and getattr(args.fsdp, "activation_checkpointing", False):
        raise ConfigurationError(
            "gradient_checkpointing=True and fsdp.activation_checkpointing=True say the same in two ways. Give one."
        )


def _generation(args: "TrainingArguments") -> None:
    if args.generation_kwargs and not args.predict_with_generate:
        raise ConfigurationError(
            "generation_kwargs says how to generate, and predict_with_generate=False never does. Give "
            "predict_with_generate=True."
        )


_AGREEMENTS: tuple[Callable[["TrainingArguments"], None], ...] = (
    _batch_size,
    _files,
    _delay,
    _best,
    _one_knob,
    _schedule,
    _order,
    _workers,
    _device,
    _splitting,
    _sharding,
    _generation,
)
