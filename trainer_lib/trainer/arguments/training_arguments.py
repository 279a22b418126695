"""`TrainingArguments`: the settings of a run, with their defaults and checks."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Self

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, path_at
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.signatures import ConstructorSignature
from trainer_lib.logging import get_logger
from trainer_lib.options.base import check_choice
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.processes.exit_codes import STOP_SIGNALS
from trainer_lib.trainer.arguments.rules import check_consistency, check_names, check_values
from trainer_lib.trainer.arguments.value_types import NEVER, read_duration, read_tokens, read_warmup
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

_logger = get_logger(__name__)

Unwritable = Literal["refuse", "leave out"]

_DRY_BATCHES = 2
_AUTO_SIZE = 64


@dataclass(kw_only=True)
class TrainingArguments:
    """All settings of a run that can be written as text or numbers, checked when you create it.

    Amounts of training are texts with a unit: "500 steps", "1 epoch", "100k samples", "10 minutes"; a bare number means
    optimizer steps. Arguments with the same meaning as in Hugging Face's Trainer have the same names; for the others
    the error says what to give instead. Values are stored in the form in which files hold them: paths and intervals as
    texts, numbers as Python numbers.

    Args:
        output_dir: The folder in which each run gets a folder of its own, as a path or a URL such as
            `s3://bucket/runs`; `None` writes nothing.
        run_name: A display name for the run.
        resume: Which run to resume: "never" starts a new one, "auto" resumes the newest unfinished run in `output_dir`,
            "extend" also resumes a finished one that now has more epochs or steps to train, and a path resumes that
            checkpoint.
        seed: The seed for weights, dropout and the order of the data; `None` seeds nothing.
        data_seed: The seed for the order of the data alone; `None` uses `seed`.

        num_train_epochs: Epochs to train, fractions allowed; the run ends at the first limit reached of this,
            `max_steps`, `max_tokens` and `max_time`, and after 3 epochs without any of them.
        max_steps: Optimizer steps after which the run ends; `None` sets no limit.
        max_tokens: Tokens after which the run ends, a number or a text such as "10B": the `input_ids` of all ranks
            without the padding that `attention_mask` marks; `None` sets no limit.
        max_time: Training time after which the run ends, summed over restarts: "90 minutes", "1-12:00:00", seconds or a
            `timedelta`; `None` sets no limit.
        deadline: The time by which the program must have ended, last checkpoint included: a date and time
            ("2030-01-31T18:00"), seconds since 1970, or "auto" for the end of the SLURM job, if there is one. The run
            saves, exits with code 75, and resumes from there; `None` sets no deadline.
        stop_signals: The signals, by name, at which the run saves and ends.

        per_device_train_batch_size: Samples in the micro-batch of a rank. "auto" takes 64 (or a divisor of
            `global_batch_size`) and splits a micro-batch that does not fit into memory; the updates stay the same.
        per_device_eval_batch_size: Samples in an evaluation batch of a rank; `None` uses the training batch size.
        gradient_accumulation_steps: Micro-batches that a rank accumulates for one optimizer step; `None` means 1.
        global_batch_size: Samples of all ranks in one optimizer step, from which the accumulation steps follow; `None`
            uses `gradient_accumulation_steps`.

        learning_rate: The learning rate at the end of the warm-up.
        optimizer: The optimizer: "adamw", "sgd" or another one of torch by its name in lower case, or a dotted path.
        optimizer_kwargs: Further arguments of the optimizer, such as {"betas": [0.9, 0.95]}.
        weight_decay: The weight decay for all parameters except norms, biases and vectors.
        parameter_groups: A list of `ParameterGroup`: learning rate, weight decay or freezing for parameters by patterns
            of their names.
        lr_scheduler: The learning rate schedule: "linear", "cosine", "wsd", "constant", "plateau" or another name, or
            a dotted path.
        lr_scheduler_kwargs: Further arguments of the schedule.
        warmup: Steps in which the learning rate rises from 0, as a number ("100 steps" or 100) or a fraction of all
            steps (0.05 or "5%"); `None` means no warm-up.
        schedule_steps: Optimizer steps over which the schedule runs; `None` uses the length of the run.
        max_grad_norm: The norm to which gradients are clipped; `None` does not clip.

        mixed_precision: "no", "fp16", "bf16", or "bf16-true" for weights in bf16; `None` uses what the launcher set.
        compile: Compile the model with torch.compile: True, the name of a backend, or a `TorchDynamoPlugin`.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them.
        fsdp: Shard the model with FSDP2: True, or a `FullyShardedDataParallelPlugin`.
        parallelism: A `ParallelismConfig`: how many ranks replicate the model and how many share one copy.
        ddp: Options of DDP, as `DistributedDataParallelKwargs`.
        sync_batchnorm: Compute BatchNorm's statistics over the batches of all ranks.
        tf32: Whether accelerators may multiply in TF32; `None` keeps torch's setting.
        deterministic: Use only algorithms that return the same result every time.
        detect_anomaly: Name the operation whose gradient is NaN; this is slow.
        gc_every: How often Python's garbage collector runs, on all ranks at once; `None` leaves it to Python.
        use_cpu: Train on the CPU even if an accelerator is available.

        log_every: How often to log, or "never".
        eval_every: How often to evaluate, or "never"; `None` evaluates each epoch if there is an evaluation set. For
            several sets a mapping by name: {"dev": "100 steps", "test": "1 epoch", "train": "never"}.
        eval_delay: Training before the first scheduled evaluation, such as "2 epochs"; `None` means no delay.
        eval_on_start: Evaluate before the first step too.
        save_every: How often to save a checkpoint, or "never"; `None` saves each epoch if there is an `output_dir`.
        save_in_background: Write checkpoints in a thread, from a copy in host memory, while training continues.
        on_save_error: What to do when a checkpoint cannot be written: "continue" warns, and saves again when the next
            checkpoint is due; "raise" ends the run.
        on_exception: What to do when an error ends the run between two updates, such as one that the dataset raises:
            "save" writes a checkpoint of the state after the last update (with an `output_dir`; on several ranks if
            all of them raise), "raise" writes none.
        on_nonfinite: What to do when a loss or gradient is NaN or Inf, which never changes a weight: "raise" ends the
            run, "skip" skips the update, "rewind" loads the last checkpoint and skips the update then.
        max_nonfinite: How many updates a run may skip because of NaN, Inf or loss spikes, before it ends with an error.
        loss_spike: A loss this many deviations above the median of the last 50 updates is treated like NaN; `None`
            ignores spikes.
        hang_timeout: Time without progress after which the run ends and names the rank that hangs: seconds, or a text
            such as "10 minutes"; `None` turns hang detection off.
        keep_last: How many of the newest checkpoints to keep; `None` keeps all.
        keep_best: How many of the best checkpoints to keep in addition.
        keep_every: How often to keep a checkpoint permanently, such as "1000 steps": the first one saved at or after
            each multiple; `None` keeps none permanently.
        metric_for_best: The metric by which checkpoints are ranked; `None` uses the evaluation loss. With several sets,
            "mean_loss" or another "mean_…" is the mean over them.
        greater_is_better: Whether higher is better; inferred for common metric names.
        load_best_at_end: Load the best checkpoint when training ends.

        shuffle: Shuffle the samples, in a new order for each epoch.
        num_workers: Worker processes that load data for each rank; 0 loads in the training process.
        pin_memory: Load into page-locked memory, from which accelerators copy faster; `None` does so if there is an
            accelerator.
        prefetch_factor: Batches that each worker loads ahead; `None` uses torch's default.
        persistent_workers: Keep the workers alive between epochs.
        seed_each_sample: Seed the random generators before each sample from seed, epoch and index (about 7 µs per
            sample), so that a dataset which draws random numbers in workers also resumes bit for bit.
        drop_last: Drop the last batch of an epoch if it is not full.
        group_by_length: Put samples of similar length into one batch.
        remove_unused_columns: Drop the columns of a dataset that the model's `forward` does not take; False raises an
            error for them. True for arguments of Hugging Face's Trainer, unless they set it.
        length_column: The column of the dataset that holds the lengths, if there is one.
        sample_weights: How often each sample is drawn, relative to the others; `None` draws all equally.
        validation_split: The fraction of `train_dataset` to evaluate on instead of training on it, if no `eval_dataset`
            is given: 0.1 holds out 10 % of the rows, the same ones for each seed; `None` holds out none.
        on_bad_sample: What to do when a sample cannot be read or collated: "raise" ends the run with its index, "skip"
            skips the sample, reports it at the end and lists it in `quarantine.jsonl`.
        max_bad_samples: How many samples a run may skip before it ends with an error: a number, or a fraction of the
            data below 1.

        limit_train_batches: Batches of an epoch, at most; `None` sets no limit.
        limit_eval_batches: Batches of an evaluation, at most; `None` sets no limit.
        overfit_batches: Train and evaluate on this many first batches only, in a fixed order; `None` uses all.
        dry_run: Train, evaluate and log once on two batches, and write nothing.
        label_names: The keys of a batch that hold labels; `None` looks for "labels", "label", "targets", "target" and
            "y".

        predict_with_generate: Call the model's `generate` in evaluations and predictions.
        generation_kwargs: Arguments of `generate`.

        progress_bar: Show a progress bar; `None` shows it in terminals and notebooks.
        report_to: The trackers to report to, by name: "tensorboard", "mlflow", "comet_ml", "wandb" and others; "all"
            for those that are installed and configured.

    Example:
        >>> args = TrainingArguments(max_steps=1000, warmup="5%", eval_every="200 steps")
        >>> args.eval_interval, args.warmup_steps_for(1000)
        (Every(amount=200, unit='steps'), 50)
        >>> TrainingArguments(save_steps=500)
        Traceback (most recent call last):
        ...
        trainer_lib.foundation.errors.ConfigurationError: save_steps=500 ... is given here as save_every="500 steps".
    """

    output_dir: str | os.PathLike[str] | None = None
    run_name: str | None = None
    resume: str | os.PathLike[str] = NEVER
    seed: int | None = 42
    data_seed: int | None = None

    num_train_epochs: float | None = None
    max_steps: int | None = None
    max_tokens: int | str | None = None
    max_time: float | timedelta | str | None = None
    deadline: str | float | datetime | None = "auto"
    stop_signals: Sequence[str] = STOP_SIGNALS

    per_device_train_batch_size: int | Literal["auto"] = 8
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None

    learning_rate: float = 5e-5
    optimizer: str = "adamw"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    weight_decay: float = 0.0
    parameter_groups: Sequence[ParameterGroup] = field(default_factory=list[ParameterGroup])
    lr_scheduler: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    warmup: int | float | str | None = None
    schedule_steps: int | None = None
    max_grad_norm: float | None = 1.0

    mixed_precision: Literal["no", "fp16", "bf16", "bf16-true"] | None = None
    compile: bool | str | TorchDynamoPlugin = False
    gradient_checkpointing: bool = False
    fsdp: bool | FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None
    ddp: DistributedDataParallelKwargs | None = None
    sync_batchnorm: bool = False
    tf32: bool | None = None
    deterministic: bool = False
    detect_anomaly: bool = False
    gc_every: int | str | timedelta | Every | None = None
    use_cpu: bool = False

    log_every: int | str | timedelta | Every = "50 steps"
    eval_every: int | str | timedelta | Every | Mapping[str, int | str | timedelta | Every] | None = None
    eval_delay: int | str | Every | None = None
    eval_on_start: bool = False
    save_every: int | str | timedelta | Every | None = None
    save_in_background: bool = True
    on_save_error: Literal["continue", "raise"] = "continue"
    on_exception: Literal["save", "raise"] = "save"
    on_nonfinite: Literal["raise", "skip", "rewind"] = "raise"
    max_nonfinite: int = 10
    loss_spike: float | None = None
    hang_timeout: str | float | timedelta | None = "10 minutes"
    keep_last: int | None = 3
    keep_best: int = 1
    keep_every: int | str | timedelta | Every | None = None
    metric_for_best: str | None = None
    greater_is_better: bool | None = None
    load_best_at_end: bool = False

    shuffle: bool = True
    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    seed_each_sample: bool = False
    drop_last: bool = False
    group_by_length: bool = False
    remove_unused_columns: bool = False
    length_column: str = "length"
    sample_weights: Sequence[float] | None = None
    validation_split: float | None = None
    on_bad_sample: Literal["raise", "skip"] = "raise"
    max_bad_samples: int | float = 10

    limit_train_batches: int | None = None
    limit_eval_batches: int | None = None
    overfit_batches: int | None = None
    dry_run: bool = False
    label_names: Sequence[str] | None = None

    predict_with_generate: bool = False
    generation_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    progress_bar: bool | None = None
    report_to: Sequence[str] = ()

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the arguments."""
        check_names(cls, positional, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        check_values(self)
        check_consistency(self)

    # -- parsed values ------------------------------------------------------------------------------------------

    @property
    def output_folder(self) -> AnyPath | None:
        """The folder in which runs are written; `None`: nothing is written."""
        return None if self.output_dir is None else path_at(self.output_dir)

    @property
    def epoch_limit(self) -> float | None:
        """The epochs after which the run ends: 3 if no other limit is set; `None`: no limit."""
        if all(getattr(self, name) is None for name in ("num_train_epochs", "max_steps", "max_tokens", "max_time")):
            return 3.0
        return self.num_train_epochs

    @property
    def token_limit(self) -> int | None:
        """The tokens after which the run ends; `None`: no limit."""
        return None if self.max_tokens is None else read_tokens("max_tokens", self.max_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit or an interval is given in tokens."""
        intervals = (self.log_interval, self.eval_interval, self.save_interval, *self.eval_intervals.values())
        return self.max_tokens is not None or any(every is not None and every.unit == "tokens" for every in intervals)

    @property
    def time_limit(self) -> float | None:
        """The seconds after which the run ends; `None`: no limit."""
        return None if self.max_time is None else read_duration("max_time", self.max_time)

    @property
    def hang_timeout_seconds(self) -> float | None:
        """The seconds without progress after which a rank counts as hung; `None`: no limit."""
        return None if self.hang_timeout is None else read_duration("hang_timeout", self.hang_timeout)

    @property
    def eval_batch_size(self) -> int:
        """The samples in an evaluation batch of a rank."""
        return self.per_device_eval_batch_size or self.train_batch_size_for(1)

    def train_batch_size_for(self, num_processes: int) -> int:
        """Return the samples in a training batch of a rank; "auto" is 64, or near it a divisor of `global_batch_size`.

        Raises:
            ConfigurationError: If `num_processes` does not divide `global_batch_size`.

        Example:
            >>> args = TrainingArguments(per_device_train_batch_size="auto", global_batch_size=192)
            >>> args.train_batch_size_for(1), args.train_batch_size_for(4)
            (64, 48)
        """
        size, whole = self.per_device_train_batch_size, self.global_batch_size
        if isinstance(size, int):
            return size
        if whole is None:
            return _AUTO_SIZE
        share, rest = divmod(whole, num_processes)
        if rest or not share:
            raise ConfigurationError(
                f"global_batch_size={whole} must be a multiple of the number of ranks ({num_processes}). Give "
                f"{(share + 1) * num_processes}, or run on another number of ranks."
            )
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        below = max(size for size in sizes if size <= _AUTO_SIZE)
        # A number with few divisors takes a larger one, which is split if it does not fit into memory.
        return below if below == share or below >= _AUTO_SIZE // 4 else min(size for size in sizes if size > _AUTO_SIZE)

    @property
    def log_interval(self) -> Every | None:
        """How often to log; `None`: never."""
        return _interval("log_every", self.log_every)

    @property
    def eval_interval(self) -> Every | None:
        """How often to evaluate, if there is something to evaluate on; `None`: never.

        If sets have different intervals, this is the first of them: `eval_intervals` has all.
        """
        if isinstance(self.eval_every, Mapping):
            return next(interval for interval in self.eval_intervals.values() if interval is not None)
        return _interval("eval_every", "1 epoch" if self.eval_every is None else self.eval_every)

    @property
    def eval_intervals(self) -> dict[str, Every | None]:
        """How often to evaluate each set, by name (`None`: never); empty if all sets share `eval_interval`."""
        by_set = self.eval_every if isinstance(self.eval_every, Mapping) else {}
        return {name: _interval(f"eval_every[{name!r}]", interval) for name, interval in by_set.items()}

    @property
    def evaluation_delay(self) -> Every | None:
        """How much to train before the first scheduled evaluation; `None`: no delay."""
        return None if self.eval_delay is None else Every.parse(self.eval_delay, "eval_delay")

    @property
    def save_interval(self) -> Every | None:
        """How often to save; `None`: never."""
        if self.output_dir is None:
            return None
        return _interval("save_every", "1 epoch" if self.save_every is None else self.save_every)

    @property
    def gc_interval(self) -> Every | None:
        """How often to collect garbage; `None`: when Python does."""
        return None if self.gc_every is None else Every.parse(self.gc_every, "gc_every")

    def warmup_steps_for(self, total_steps: int | None) -> int:
        """Return the warm-up steps of a run or schedule of `total_steps` steps.

        Args:
            total_steps: Steps of the run or schedule; `None` if unknown.

        Raises:
            ConfigurationError: If the warm-up is a fraction of the steps and these are unknown.

        Example:
            >>> TrainingArguments(warmup=0.1).warmup_steps_for(30)
            3
        """
        warmup = 0 if self.warmup is None else read_warmup("warmup", self.warmup)
        if isinstance(warmup, int):
            return warmup
        if total_steps is None:
            raise ConfigurationError(
                f"warmup={self.warmup!r} is a fraction of all steps, and their number is unknown. Give max_steps or "
                'schedule_steps, or a warm-up in steps, such as "100 steps".'
            )
        # Rounded first: 0.1 * 30 is a little more than 3.
        return math.ceil(round(warmup * total_steps, 6))

    def effective(self) -> "TrainingArguments":
        """Return the arguments that a run uses: those that `dry_run` implies, if it is set.

        A dry run trains one epoch of two batches, evaluates on two, logs each step and writes nothing: `output_dir`
        and what depends on it are unset. The schedule stays that of the whole run if `schedule_steps` or `max_steps`
        gives its length; if not, a warm-up in steps is dropped.

        Example:
            >>> args = TrainingArguments(dry_run=True, max_steps=1000, output_dir="runs").effective()
            >>> args.limit_train_batches, args.num_train_epochs, args.max_steps, args.output_dir
            (2, 1, None, None)
        """
        if not self.dry_run:
            return self
        changes: dict[str, Any] = {"num_train_epochs": 1, "max_steps": None, "max_time": None, "log_every": "1 step"}
        changes["max_tokens"] = None
        changes |= {"output_dir": None, "resume": NEVER, "save_every": None, "load_best_at_end": False}
        changes["report_to"] = ()
        if self.overfit_batches is not None:
            changes["overfit_batches"] = min(self.overfit_batches, _DRY_BATCHES)
        else:
            for name in ("limit_train_batches", "limit_eval_batches"):
                changes[name] = min(getattr(self, name) or _DRY_BATCHES, _DRY_BATCHES)
        steps = self.schedule_steps or self.max_steps
        changes["schedule_steps"] = steps
        if steps is None and self.warmup is not None and isinstance(read_warmup("warmup", self.warmup), int):
            changes["warmup"] = None
        return dataclasses.replace(self, **changes)

    # -- dicts, files, command line -------------------------------------------------------------------------------

    def to_dict(self, *, unwritable: Unwritable = "refuse") -> dict[str, Any]:
        """Return all arguments as plain values, which `from_dict` reads back.

        Args:
            unwritable: What to do with an argument that has no plain form, such as a plugin that holds a function:
                "refuse" raises an error, "leave out" omits it with a warning.

        Raises:
            ConfigurationError: If an argument has no plain form and `unwritable` is "refuse".

        Example:
            >>> TrainingArguments.from_dict(TrainingArguments(max_steps=10).to_dict()).max_steps
            10
        """
        check_choice("unwritable", unwritable, ("refuse", "leave out"))
        from trainer_lib.trainer.arguments import yaml_json

        plain, left_out = yaml_json.to_plain(self)
        for name, reason in left_out.items():
            if unwritable == "refuse":
                raise ConfigurationError(f"{reason} Leave it out here, and set it in the program.")
            _logger.warning_once("%s %s is not saved: give it again when you resume the run.", reason, name)
        return plain

    @classmethod
    def from_dict(cls, arguments: Mapping[str, Any]) -> Self:
        """Return arguments made from the plain values of `to_dict`, or from some of them by name."""
        from trainer_lib.trainer.arguments import yaml_json

        return cls(**yaml_json.from_plain(arguments))

    def to_file(self, path: str | os.PathLike[str], *, unwritable: Unwritable = "refuse") -> None:
        """Write all arguments to a .json, .yaml or .yml file.

        Args:
            path: The file.
            unwritable: As in `to_dict`.
        """
        from trainer_lib.trainer.arguments import yaml_json

        yaml_json.write(path, self.to_dict(unwritable=unwritable))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | RemotePath) -> Self:
        """Return the arguments in a .json, .yaml or .yml file."""
        from trainer_lib.trainer.arguments import yaml_json

        return yaml_json.read(path, cls.from_dict)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Return the arguments given on the command line: `--max_steps 1000 --config run.yaml …`.

        Options override the files of `--config`, later files override earlier ones, and files override `defaults`. An
        invalid option ends the program with exit code 2 and a line that says what to give.

        Args:
            argv: The options; `None` takes those of the program.
            **defaults: Values that replace the defaults of this class.

        Raises:
            MissingPackageError: If the extra `cli` is not installed.
        """
        from trainer_lib.trainer.arguments.command_line import parse

        return parse(cls, argv, defaults)

    @classmethod
    def from_transformers(cls, arguments: Any) -> Self:
        """Return the arguments of a `transformers.TrainingArguments`, with a warning for those that have no equivalent.

        An argument at Hugging Face's default takes the default of this class, except `remove_unused_columns`: datasets
        made for that trainer may need it.

        Args:
            arguments: The arguments of Hugging Face's Trainer.
        """
        from trainer_lib.trainer.huggingface import argument_conversion

        changed = argument_conversion.differing(arguments)
        ours, lost = argument_conversion.convert(changed, {field.name for field in dataclasses.fields(cls)})
        if lost:
            lines = "".join(f"\n  {names}: {reason}" for names, reason in lost.items())
            _logger.warning("These arguments of Hugging Face's Trainer have no equivalent here:%s", lines)
        ours.setdefault("remove_unused_columns", bool(arguments.remove_unused_columns))
        return cls(**ours)


def _interval(name: str, value: Any) -> Every | None:
    return None if value == NEVER else Every.parse(value, name)
