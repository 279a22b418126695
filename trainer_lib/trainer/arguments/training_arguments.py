"""This file is `TrainingArguments`: everything that can be said about a run without an object."""

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
from trainer_lib.trainer.arguments.rules import check_agreement, check_names, check_values
from trainer_lib.trainer.arguments.value_types import NEVER, read_duration, read_tokens, read_warmup
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

_logger = get_logger(__name__)

Unwritable = Literal["refuse", "leave out"]

_DRY_BATCHES = 2
_AUTO_SIZE = 64


@dataclass(kw_only=True)
class TrainingArguments:
    """Everything that can be said about a run without an object, checked when it is said.

    Amounts of training are texts with a unit: "500 steps", "1 epoch", "100k samples", "10 minutes"; a bare number is
    steps. Arguments of Hugging Face's Trainer that mean the same have the same names; the others are refused with what
    to give in their place. Values are kept in the form in which they can be written down: paths and intervals as texts,
    numbers as Python's.

    Args:
        output_dir: The folder for runs, each in a folder of its own, or its URL, such as `s3://bucket/runs`; by default
            nothing is written.
        run_name: A name for people to know the run by.
        resume: "never"; "auto": go on with the newest unfinished run in `output_dir`; "extend": with a finished one
            too, as there are more epochs or steps now; or the path of a checkpoint.
        seed: Seeds weights, dropout and the order of the data; `None` seeds nothing.
        data_seed: Seeds the order of the data alone.

        num_train_epochs: Passes over the data. Of this and the next three the first reached ends the run; with none of
            them it is 3 passes.
        max_steps: Updates.
        max_tokens: Tokens that end the run: those of `input_ids`, of all processes, without what `attention_mask` marks
            as padding. A number, or a text such as "10B".
        max_time: Time, over all restarts: "90 minutes", "1-12:00:00", seconds or a `timedelta`.
        deadline: When the program has to be through, its last save included: a date and time ("2030-01-31T18:00"),
            seconds since 1970, or "auto": what the scheduler tells (SLURM), if there is one. The run then ends with
            exit code 75, and goes on where it was.
        stop_signals: The signals at which a run saves and ends, by name.

        per_device_train_batch_size: Samples that a process computes at once. With "auto" they are 64 (or what makes up
            `global_batch_size`), computed in parts from where they do not fit into memory; updates stay the same.
        per_device_eval_batch_size: The same in evaluation; by default as in training.
        gradient_accumulation_steps: Batches of a process that make one update.
        global_batch_size: Samples of all processes that make one update, in the place of the accumulation.

        learning_rate: The learning rate after the warm-up.
        optimizer: A name: "adamw", "sgd" and torch's others in lower case, or a dotted path.
        optimizer_kwargs: More arguments of the optimizer, such as {"betas": [0.9, 0.95]}.
        weight_decay: Weight decay of all but norms, biases and vectors.
        parameter_groups: What is trained otherwise than the rest, by patterns of names.
        lr_scheduler: The schedule by name: "linear", "cosine", "wsd", "constant", "plateau" and others.
        lr_scheduler_kwargs: More arguments of the schedule.
        warmup: Steps ("100 steps" or 100), or a part of all steps (0.05 or "5%"), in which the rate rises from 0.
        schedule_steps: The updates that the schedule is made for; by default those of the run.
        max_grad_norm: The norm to which gradients are clipped; `None` leaves them as they are.

        mixed_precision: "no", "fp16", "bf16", or "bf16-true" for weights in bf16; by default what the launcher says.
        compile: Whether to compile the model; or with which backend; or a `TorchDynamoPlugin`.
        gradient_checkpointing: Compute activations again in the backward instead of keeping them.
        fsdp: Shard the model over the processes; or how, as a plugin.
        parallelism: How many processes replicate a model, and how many share one copy.
        ddp: Options of DDP.
        sync_batchnorm: Have BatchNorm take its statistics from the batches of all processes.
        tf32: Whether accelerators may multiply in TF32; by default as torch is set.
        deterministic: Take only algorithms that give the same result each time.
        detect_anomaly: Name the operation whose gradient is not a number; slow.
        gc_every: Collect garbage at this interval only, on all processes at once; by default as Python does.
        use_cpu: Stay on the CPU even if there is an accelerator.

        log_every: How often to log, or "never".
        eval_every: How often to evaluate, or "never"; by default each epoch, if there is something to evaluate on. For
            several sets also by their names: {"dev": "100 steps", "test": "1 epoch", "train": "never"}.
        eval_delay: How much to train before the first evaluation that is due at its interval, such as "2 epochs".
        eval_on_start: Evaluate before the first step too.
        save_every: How often to save, or "never"; by default each epoch, if there is an `output_dir`.
        save_in_background: Whether a thread writes checkpoints, from a copy in host memory, while training goes on.
        on_save_error: What follows when the disk does not take a checkpoint: "continue" warns, trains on and saves when
            that is due again; "raise" ends the run.
        on_exception: What follows when an error ends the run between two updates, such as one that the dataset raises:
            "save" saves the state after the last update (with an `output_dir`; on several ranks if all of them raise),
            "raise" saves nothing.
        on_nonfinite: What follows when a loss or gradients are not finite, which never changes a weight: "raise" ends
            the run, "skip" leaves the update out, "rewind" goes back to the last checkpoint and then leaves it out.
        max_nonfinite: How many updates of a run may be left out.
        loss_spike: A loss this many deviations above the median of the last 50 updates is treated in the same way.
        hang_timeout: After how long without progress a run ends, naming the rank that hangs: seconds, or "10 minutes".
        keep_last: How many of the newest checkpoints to keep; `None` keeps all.
        keep_best: How many of the best checkpoints to keep besides.
        keep_every: How often to keep one for good, such as "1000 steps": of those that are saved, the first at or after
            each multiple.
        metric_for_best: The metric that says which is the best; by default the loss of the evaluation. Of several sets
            "mean_loss" or another "mean_…" is the mean over them.
        greater_is_better: Whether more of it is better; known for well-known names.
        load_best_at_end: Go back to the best checkpoint when training ends.

        shuffle: Whether each pass takes the samples in a new order.
        num_workers: Processes that load data for each process; 0 loads in the process itself.
        pin_memory: Load into memory that accelerators can copy from; by default if there is one.
        prefetch_factor: Batches that each worker has ready.
        persistent_workers: Keep workers between passes.
        seed_each_sample: Seed the random generators before each sample from seed, epoch and index (about 7 µs a
            sample), so that a dataset which draws random numbers in workers resumes to the bit too.
        drop_last: Drop a last batch that is not full.
        group_by_length: Make batches of samples of about the same length.
        remove_unused_columns: Leave columns of a dataset out of batches that the model's `forward` does not take; by
            default they are an error. True for arguments of Hugging Face's Trainer, unless they say otherwise.
        length_column: The column of the dataset with the lengths, if it has one.
        sample_weights: How often each sample is drawn, relative to the others.
        validation_split: The share of `train_dataset` to evaluate on instead of training on it, where no `eval_dataset`
            is given: 0.1 holds out 10 % of the rows, the same ones for each seed.
        on_bad_sample: What follows when a sample cannot be read or collated: "raise" ends the run with its index,
            "skip" leaves it out of its batch, tells of it in the end, and lists it in `quarantine.jsonl`.
        max_bad_samples: How many samples may be left out: a number, or below 1 a share of the data.

        limit_train_batches: Batches of a pass, at most.
        limit_eval_batches: Batches of an evaluation, at most.
        overfit_batches: Train and evaluate on so many first batches only, in their order.
        dry_run: Run everything once on two batches, and keep nothing.
        label_names: The keys of a batch that are labels.

        predict_with_generate: Have evaluations and predictions generate.
        generation_kwargs: Arguments of `generate`.

        progress_bar: Whether to show a progress bar; by default where somebody can see it.
        report_to: The trackers to report to, by their names: "tensorboard", "mlflow", "comet_ml", "wandb" and others;
            "all" for those that are installed and configured.

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

    # Before __init__, which would call an unknown name a TypeError, and know no better one.
    def __new__(cls, *positional: Any, **given: Any) -> Self:
        """Check the names."""
        check_names(cls, positional, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the values."""
        check_values(self)
        check_agreement(self)

    # -- in parsed form ------------------------------------------------------------------------------------------

    @property
    def output_folder(self) -> AnyPath | None:
        """Where runs are written."""
        return None if self.output_dir is None else path_at(self.output_dir)

    @property
    def epoch_limit(self) -> float | None:
        """The passes that end the run: 3, if nothing else would."""
        if all(getattr(self, name) is None for name in ("num_train_epochs", "max_steps", "max_tokens", "max_time")):
            return 3.0
        return self.num_train_epochs

    @property
    def token_limit(self) -> int | None:
        """The tokens that end the run."""
        return None if self.max_tokens is None else read_tokens("max_tokens", self.max_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether something goes by the number of tokens."""
        intervals = (self.log_interval, self.eval_interval, self.save_interval, *self.eval_intervals.values())
        return self.max_tokens is not None or any(every is not None and every.unit == "tokens" for every in intervals)

    @property
    def time_limit(self) -> float | None:
        """The seconds that end the run."""
        return None if self.max_time is None else read_duration("max_time", self.max_time)

    @property
    def seconds_until_hung(self) -> float | None:
        """The seconds without a move after which processes hang."""
        return None if self.hang_timeout is None else read_duration("hang_timeout", self.hang_timeout)

    @property
    def eval_batch_size(self) -> int:
        """The samples that a process evaluates at once."""
        return self.per_device_eval_batch_size or self.train_batch_size_for(1)

    def train_batch_size_for(self, num_processes: int) -> int:
        """Return the samples of a process's batch; of "auto" 64, or about as many, which make up `global_batch_size`.

        Raises:
            ConfigurationError: If `global_batch_size` cannot be shared out.

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
        own, rest = divmod(whole, num_processes)
        if rest or not own:
            raise ConfigurationError(f"global_batch_size={whole} is no multiple of the {num_processes} processes.")
        sizes = [one for one in range(1, own + 1) if own % one == 0]
        below = max(size for size in sizes if size <= _AUTO_SIZE)
        # Of a number with few divisors a larger one, which is computed in parts if need be.
        return below if below == own or below >= _AUTO_SIZE // 4 else min(size for size in sizes if size > _AUTO_SIZE)

    @property
    def log_interval(self) -> Every | None:
        """How often to log; `None`: never."""
        return _interval("log_every", self.log_every)

    @property
    def eval_interval(self) -> Every | None:
        """How often to evaluate, if there is something to evaluate on; `None`: never.

        Where sets have intervals of their own, this is the first of these: `eval_intervals` has all.
        """
        if isinstance(self.eval_every, Mapping):
            return next(interval for interval in self.eval_intervals.values() if interval is not None)
        return _interval("eval_every", "1 epoch" if self.eval_every is None else self.eval_every)

    @property
    def eval_intervals(self) -> dict[str, Every | None]:
        """How often to evaluate each set, by its name (`None`: never); empty where all sets share `eval_interval`."""
        by_set = self.eval_every if isinstance(self.eval_every, Mapping) else {}
        return {name: _interval(f"eval_every[{name!r}]", interval) for name, interval in by_set.items()}

    @property
    def evaluation_delay(self) -> Every | None:
        """How much to train before the first evaluation at an interval; `None`: nothing."""
        return None if self.eval_delay is None else Every.parse(self.eval_delay, "eval_delay")

    @property
    def save_interval(self) -> Every | None:
        """How often to save; `None`: never."""
        if self.output_dir is None:
            return None
        return _interval("save_every", "1 epoch" if self.save_every is None else self.save_every)

    @property
    def gc_interval(self) -> Every | None:
        """How often to collect garbage; `None`: as Python does."""
        return None if self.gc_every is None else Every.parse(self.gc_every, "gc_every")

    def warmup_steps_for(self, total_steps: int | None) -> int:
        """Return the steps of the warm-up of a run, or a schedule, of so many steps.

        Args:
            total_steps: The steps; `None` where they are not known.

        Raises:
            ConfigurationError: If the warm-up is a part of steps that are not known.

        Example:
            >>> TrainingArguments(warmup=0.1).warmup_steps_for(30)
            3
        """
        warmup = 0 if self.warmup is None else read_warmup("warmup", self.warmup)
        if isinstance(warmup, int):
            return warmup
        if total_steps is None:
            raise ConfigurationError(
                f"warmup={self.warmup!r} is a part of all steps, and how many there are is not known. Give max_steps "
                'or schedule_steps, or a warm-up in steps, such as "100 steps".'
            )
        # Rounded first: 0.1 * 30 is a little more than 3.
        return math.ceil(round(warmup * total_steps, 6))

    def effective(self) -> "TrainingArguments":
        """Return the arguments as a run goes by them: what `dry_run` means, said by the others.

        A dry run makes one pass over two batches, evaluates on two, logs each step and writes nothing: `output_dir`
        is left out, and what depends on it. The schedule stays that of the whole run, where its length is known from
        `schedule_steps` or `max_steps`; where not, a warm-up in steps is left out.

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

    # -- from elsewhere, and back --------------------------------------------------------------------------------

    def to_dict(self, *, unwritable: Unwritable = "refuse") -> dict[str, Any]:
        """Return all arguments as plain values, which `from_dict` reads back.

        Args:
            unwritable: What to do about an argument that has no plain form, such as a plugin with a function in it:
                "refuse" it, or "leave out" that one, with a warning.

        Raises:
            ConfigurationError: If there is one, and it is to be refused.

        Example:
            >>> TrainingArguments.from_dict(TrainingArguments(max_steps=10).to_dict()).max_steps
            10
        """
        check_choice("unwritable", unwritable, ("refuse", "leave out"))
        from trainer_lib.trainer.arguments import yaml_json

        plain, left_out = yaml_json.to_plain(self)
        for name, reason in left_out.items():
            if unwritable == "refuse":
                raise ConfigurationError(f"{reason} Leave it out there, and give it in the program.")
            _logger.warning_once("%s So %s is left out there: give it again where the run goes on.", reason, name)
        return plain

    @classmethod
    def from_dict(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the arguments that `to_dict` wrote, or some of them by name."""
        from trainer_lib.trainer.arguments import yaml_json

        return cls(**yaml_json.from_plain(arguments))

    def to_file(self, path: str | os.PathLike[str], *, unwritable: Unwritable = "refuse") -> None:
        """Write all arguments into a file, as its ending says: .json, .yaml or .yml.

        Args:
            path: The file.
            unwritable: As `to_dict` takes it.
        """
        from trainer_lib.trainer.arguments import yaml_json

        yaml_json.write(path, self.to_dict(unwritable=unwritable))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | RemotePath) -> Self:
        """Return the arguments that a file gives: .json, .yaml or .yml."""
        from trainer_lib.trainer.arguments import yaml_json

        return yaml_json.read(path, cls.from_dict)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Return the arguments given on the command line: `--max_steps 1000 --config run.yaml …`.

        Options count before the files of `--config`, of which later ones count before earlier ones, and these before
        `defaults`. Bad ones end the program as they do in other programs, with a line that says what to give.

        Args:
            argv: The options; by default those of the program.
            **defaults: Arguments in the place of the usual defaults.

        Raises:
            MissingPackageError: Without the extra `cli`.
        """
        from trainer_lib.trainer.arguments.command_line import parse

        return parse(cls, argv, defaults)

    @classmethod
    def from_transformers(cls, arguments: Any) -> Self:
        """Return what a `transformers.TrainingArguments` says, and warn of all that has no place here.

        What is at Hugging Face's default is left at the default of this class, but for `remove_unused_columns`:
        datasets made for that trainer may count on it.

        Args:
            arguments: The arguments of Hugging Face's Trainer.
        """
        from trainer_lib.trainer.huggingface import argument_conversion

        given = argument_conversion.differing(arguments)
        ours, lost = argument_conversion.convert(given, {one.name for one in dataclasses.fields(cls)})
        if lost:
            lines = "".join(f"\n  {names}: {reason}" for names, reason in lost.items())
            _logger.warning("Of the arguments of Hugging Face's Trainer these have no place here:%s", lines)
        ours.setdefault("remove_unused_columns", bool(arguments.remove_unused_columns))
        return cls(**ours)


def _interval(name: str, value: Any) -> Every | None:
    return None if value == NEVER else Every.parse(value, name)
