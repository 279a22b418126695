"""`TrainingArguments`: the settings of a run. Each is declared once, on its field."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Self

from typing_extensions import TypeAliasType

import trainer_lib  # for types that few runs need: its names are imported when a type hint is resolved
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.duration import NEVER, Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.processes.exit_codes import STOP_SIGNALS
from trainer_lib.trainer.arguments import value_checks as checks
from trainer_lib.trainer.arguments.base import ArgumentsBase
from trainer_lib.trainer.arguments.declaration import OnResume, documented, setting
from trainer_lib.trainer.arguments.rules import check_rules
from trainer_lib.trainer.optim.optimizer_packages import steps_in_backward

_logger = get_logger(__name__)

Interval = int | str | timedelta | Every
# transformers' HfArgumentParser takes no union without `None` or `str`, so these are types with a name. It calls
# isinstance with the second member of a union, so a plain class comes second in the unions below.
CountOrAuto = TypeAliasType("CountOrAuto", int | Literal["auto"])
CountOrShare = TypeAliasType("CountOrShare", int | float)
FlagOrPlugin = TypeAliasType("FlagOrPlugin", bool | FullyShardedDataParallelPlugin)

# The sections of the arguments, in the order in which help and documentation list them.
RUN = "run"
LENGTH = "length: the first limit reached ends the run"
BATCHES = "batches"
OPTIMIZER = "optimizer and schedule"
DEVICES = "precision, memory, distributed training"
CHECKPOINTS = "logs, evaluations, checkpoints"
DATA = "data"
DEBUGGING = "debugging"
GENERATION = "generation"
TRACKERS = "progress and trackers"

_NO_LIMIT = " For no limit, leave it out."
_BATCHES = " Give a number of batches; for no limit, leave it out."
_EVAL_BATCHES = f'{_BATCHES[:-1]}, and for no evaluations give eval_every="never".'
_DRY_BATCHES = 2
_AUTO_SIZE = 64


@documented
@dataclass(kw_only=True, repr=False, eq=False)
class TrainingArguments(ArgumentsBase):
    """All settings of a run that can be written as text or numbers, checked when you create it.

    Amounts of training are texts with a unit: "500 steps", "1 epoch", "100k samples", "10 minutes"; a bare number means
    optimizer steps. Arguments with the same meaning as in Hugging Face's Trainer have the same names; for each other
    one, an error names the argument to use instead. Values are stored as files hold them: paths and intervals as texts,
    numbers as Python numbers.

    Example:
        >>> args = TrainingArguments(max_steps=1000, warmup="5%", eval_every="200 steps")
        >>> args.eval_interval, args.warmup_steps_for(1000)
        (Every(amount=200, unit='steps'), 50)
        >>> TrainingArguments(save_steps=500)
        Traceback (most recent call last):
        ...
        trainer_lib.foundation.errors.ConfigurationError: save_steps=500 ... is given here as save_every="500 steps".
    """

    output_dir: os.PathLike[str] | str | None = setting(
        RUN,
        None,
        "The folder in which each run creates its own subfolder: a path, or a URL such as `s3://bucket/runs`; "
        "`None` writes nothing.",
        check=checks.folder,
        on_resume=OnResume.SILENT,
        may_differ=True,
    )
    run_name: str | None = setting(
        RUN, None, "A display name for the run.", check=checks.folder_name, on_resume=OnResume.SILENT, may_differ=True
    )
    resume: str | os.PathLike[str] = setting(
        RUN,
        NEVER,
        'Which run to resume: "never" starts a new one, "auto" resumes the newest run in `output_dir` of the same '
        'model and data, "extend" also resumes a finished one that now has more epochs or steps to train, and a path '
        "resumes that checkpoint.",
        check=checks.resume,
        on_resume=OnResume.SILENT,
    )
    seed: int | None = setting(
        RUN,
        42,
        "The seed for weights, dropout and the order of the data; `None` seeds nothing.",
        check=checks.whole(at_least=0, below=2**32),
        on_resume=OnResume.KEPT,
    )
    data_seed: int | None = setting(
        RUN,
        None,
        "The seed for the order of the data alone; `None` uses `seed`.",
        check=checks.whole(at_least=0, below=2**32),
        on_resume=OnResume.KEPT,
    )

    num_train_epochs: float | None = setting(
        LENGTH,
        None,
        "Epochs to train, fractions allowed. The run ends at the first limit reached of this, `max_steps`, "
        "`max_tokens` and `max_time`; with none of them, after 3 epochs.",
        check=checks.number(above=0, hint=_NO_LIMIT),
    )
    max_steps: int | None = setting(
        LENGTH,
        None,
        "Optimizer steps after which the run ends; `None` sets no limit.",
        check=checks.whole(hint=_NO_LIMIT),
    )
    max_tokens: int | str | None = setting(
        LENGTH,
        None,
        'Tokens after which the run ends, a number or a text such as "10B". Counted are the `input_ids` of all ranks, '
        "without the padding that `attention_mask` marks; `None` sets no limit.",
        check=checks.tokens,
    )
    max_time: float | timedelta | str | None = setting(
        LENGTH,
        None,
        'Training time after which the run ends, summed over restarts: "90 minutes", "1-12:00:00", seconds or a '
        "`timedelta`; `None` sets no limit.",
        check=checks.duration,
    )
    deadline: str | float | datetime | None = setting(
        LENGTH,
        "auto",
        "The time by which the program must have ended, including its last checkpoint: a date and time "
        '("2030-01-31T18:00"), seconds since 1970, or "auto" for the end of the SLURM job, if there is one. The '
        "run saves in time, exits with code 75, and can be resumed; `None` sets no deadline.",
        check=checks.moment,
        on_resume=OnResume.SILENT,
    )
    stop_signals: Sequence[str] = setting(
        LENGTH,
        STOP_SIGNALS,
        "The signals, by name, on which the run saves a checkpoint and ends.",
        check=checks.signals,
        on_resume=OnResume.SILENT,
    )

    per_device_train_batch_size: CountOrAuto = setting(
        BATCHES,
        8,
        'Samples in the micro-batch of a rank. "auto" takes 64 (or a divisor of `global_batch_size`) and splits a '
        "micro-batch that does not fit into memory; the updates stay the same.",
        check=checks.batch_size,
    )
    per_device_eval_batch_size: int | None = setting(
        BATCHES,
        None,
        "Samples in an evaluation batch of a rank; `None` uses the training batch size.",
        check=checks.eval_batch_size,
    )
    gradient_accumulation_steps: int | None = setting(
        BATCHES,
        None,
        "Micro-batches that a rank accumulates for one optimizer step; `None` means 1.",
        check=checks.whole(hint=" For no accumulation, leave it out."),
    )
    global_batch_size: int | None = setting(
        BATCHES,
        None,
        "Samples in one optimizer step, over all ranks; the accumulation steps follow from it. `None` uses "
        "`gradient_accumulation_steps`.",
        check=checks.whole(),
    )

    learning_rate: float = setting(
        OPTIMIZER, 5e-5, "The learning rate at the end of the warm-up.", check=checks.number(at_least=0)
    )
    optimizer: str = setting(
        OPTIMIZER,
        "adamw",
        'The optimizer: "adamw", "sgd" or another optimizer of torch in lower case, "muon", "galore_adamw", '
        '"apollo_adamw", "lomo" or "adalomo", one of bitsandbytes, torchao or schedulefree ("adamw_8bit", '
        '"schedule_free_adamw"), or a dotted path.',
        check=checks.optimizer_name,
        on_resume=OnResume.REFUSED,
    )
    optimizer_kwargs: dict[str, Any] = setting(
        OPTIMIZER, {}, 'Further arguments of the optimizer, such as {"betas": [0.9, 0.95]}.'
    )
    weight_decay: float = setting(
        OPTIMIZER,
        0.0,
        "The weight decay for all parameters except norms, biases and vectors.",
        check=checks.number(at_least=0),
    )
    parameter_groups: "Sequence[trainer_lib.ParameterGroup]" = setting(
        OPTIMIZER,
        [],
        "A list of `ParameterGroup`: learning rate, weight decay or freezing for the parameters whose names match a "
        "pattern.",
        check=checks.parameter_groups,
    )
    lr_scheduler: str = setting(
        OPTIMIZER,
        "linear",
        'The learning rate schedule: "linear", "cosine", "wsd", "constant", "plateau" or another name, or a '
        "dotted path.",
        check=checks.schedule_name,
    )
    lr_scheduler_kwargs: dict[str, Any] = setting(OPTIMIZER, {}, "Further arguments of the schedule.")
    warmup: int | float | str | None = setting(
        OPTIMIZER,
        None,
        'Steps over which the learning rate rises from 0: a number ("100 steps" or 100) or a fraction of all '
        'steps (0.05 or "5%"); `None` means no warm-up.',
        check=checks.warmup,
    )
    schedule_steps: int | None = setting(
        OPTIMIZER,
        None,
        "Optimizer steps over which the schedule runs; `None` uses the length of the run.",
        check=checks.whole(),
    )
    max_grad_norm: float | None = setting(
        OPTIMIZER,
        1.0,
        "The norm to which gradients are clipped; `None` does not clip.",
        check=checks.number(above=0, hint=" To leave gradients as they are, give None."),
    )

    mixed_precision: Literal["no", "fp16", "bf16", "bf16-true", "fp8"] | None = setting(
        DEVICES,
        None,
        '"no", "fp16", "bf16", "fp8", or "bf16-true" for weights in bf16; `None` uses what the launcher set.',
        check=checks.precision,
    )
    fp8: "trainer_lib.AORecipeKwargs | None" = setting(
        DEVICES, None, 'Options of `mixed_precision="fp8"`, as `AORecipeKwargs`: which layers, and how.'
    )
    compile: bool | str | TorchDynamoPlugin = setting(
        DEVICES,
        False,
        "Compile the model with torch.compile: True, the name of a backend, or a `TorchDynamoPlugin`.",
        check=checks.compilation,
    )
    gradient_checkpointing: bool = setting(
        DEVICES, False, "Recompute activations in the backward pass instead of storing them."
    )
    gradient_checkpointing_every: int = setting(
        DEVICES,
        1,
        "With `gradient_checkpointing`, recompute the activations of every n-th block only, which saves less memory "
        "and computes less twice.",
        check=checks.whole(),
    )
    gradient_checkpointing_policy: Sequence[str] | str | None = setting(
        DEVICES,
        None,
        "With `gradient_checkpointing`, the operations whose outputs are kept instead of recomputed: "
        '"matmul" (matrix products with weights, and fused attention), "attention", or a list of names such as '
        '["aten.mm"]; `None` keeps none.',
        check=checks.recompute_policy,
    )
    activation_offload: bool = setting(
        DEVICES,
        False,
        "Keep the activations of blocks in host memory until the backward; with `gradient_checkpointing`, the inputs "
        "that they are recomputed from.",
    )
    optimizer_in_backward: bool = setting(
        DEVICES,
        False,
        "Update each parameter in the backward, as soon as its gradient is complete, and free the gradient. Works on "
        "one device, with FSDP2, or with `tp_size` alone, without accumulation and clipping.",
    )
    chunked_cross_entropy: bool = setting(
        DEVICES,
        False,
        "Compute the loss of a causal language model of transformers for 512 tokens at a time, so that all its logits "
        "are never in memory at once; the results stay the same.",
    )
    use_liger_kernel: bool = setting(
        DEVICES,
        False,
        "Replace layers of a transformers model by Liger's kernels, on GPUs (`pip install liger-kernel`).",
    )
    device_map: Mapping[str, int | str] | str | None = setting(
        DEVICES,
        None,
        'Spread the model over the devices of one process, to evaluate and predict with it: "auto", "balanced", '
        '"balanced_low_0" or "sequential", or the device of each module by name.',
        check=checks.device_map,
    )
    max_memory: Mapping[int | str, int | str] | None = setting(
        DEVICES,
        None,
        'With a named `device_map` such as "auto": the memory of each device that the model may use, such as '
        '{0: "10GB", "cpu": "30GB"}.',
        check=checks.memory_limits,
    )
    offload_folder: os.PathLike[str] | str | None = setting(
        DEVICES, None, "With `device_map`: the folder for weights that are offloaded to disk.", check=checks.path
    )
    fsdp: FlagOrPlugin | None = setting(
        DEVICES, None, "Shard the model with FSDP2: True, or a `FullyShardedDataParallelPlugin`.", check=checks.sharding
    )
    deepspeed: "str | trainer_lib.DeepSpeedPlugin | os.PathLike[str] | dict[str, Any] | None" = setting(
        DEVICES,
        None,
        "Shard the model with DeepSpeed's ZeRO: the path of its JSON file, the values as a dict, or a "
        '`DeepSpeedPlugin`. Arguments fill the values that are "auto".',
        check=checks.deepspeed,
    )
    parallelism: "trainer_lib.ParallelismConfig | None" = setting(
        DEVICES, None, "A `ParallelismConfig`: how many ranks replicate the model and how many share one copy."
    )
    ddp: DistributedDataParallelKwargs | None = setting(
        DEVICES, None, "Options of DDP, as `DistributedDataParallelKwargs`."
    )
    local_sgd_steps: int | None = setting(
        DEVICES,
        None,
        "Optimizer steps that each rank takes alone, without reducing gradients, before the ranks average their "
        "weights; `None` reduces gradients in each step.",
        check=checks.whole(hint=" To reduce gradients in each step, leave it out."),
    )
    outer_learning_rate: float | None = setting(
        DEVICES,
        None,
        "With `local_sgd_steps`: the learning rate of an outer step of SGD with Nesterov momentum on the averages "
        "(DiLoCo), such as 0.7; `None` takes the averages as they are.",
        check=checks.number(above=0),
    )
    outer_momentum: float | None = setting(
        DEVICES,
        None,
        "With `outer_learning_rate`: the Nesterov momentum of the outer step; `None` means 0.9.",
        check=checks.number(at_least=0),
    )
    sync_batchnorm: bool = setting(
        DEVICES, False, "Compute BatchNorm's statistics over the batches of all ranks (SyncBatchNorm)."
    )
    tf32: bool | None = setting(
        DEVICES, None, "Whether accelerators may multiply in TF32; `None` keeps torch's setting."
    )
    deterministic: bool = setting(DEVICES, False, "Use only algorithms that return the same result every time.")
    detect_anomaly: bool = setting(
        DEVICES, False, "Find the operation whose gradient is NaN (torch's anomaly detection); slow."
    )
    gc_every: Interval | None = setting(
        DEVICES,
        None,
        "How often Python's garbage collector runs, on all ranks at once; `None` leaves it to Python.",
        check=checks.amount,
    )
    use_cpu: bool = setting(DEVICES, False, "Train on the CPU even if an accelerator is available.")

    log_every: Interval = setting(CHECKPOINTS, "50 steps", 'How often to log, or "never".', check=checks.interval)
    eval_every: Interval | Mapping[str, Interval] | None = setting(
        CHECKPOINTS,
        None,
        'How often to evaluate, or "never"; `None` evaluates each epoch if there is an evaluation set. For '
        'several sets, a mapping by name: {"dev": "100 steps", "test": "1 epoch", "train": "never"}.',
        check=checks.intervals,
    )
    eval_delay: int | str | Every | None = setting(
        CHECKPOINTS,
        None,
        'How long to train before the first scheduled evaluation, such as "2 epochs"; `None` means no delay.',
        check=checks.counted_amount,
    )
    eval_on_start: bool = setting(CHECKPOINTS, False, "Evaluate before the first step too.")
    save_every: Interval | None = setting(
        CHECKPOINTS,
        None,
        'How often to save a checkpoint, or "never"; `None` saves each epoch if there is an `output_dir`.',
        check=checks.interval,
    )
    save_in_background: bool = setting(
        CHECKPOINTS, True, "Write checkpoints in a thread, from a copy in host memory, while training continues."
    )
    on_save_error: Literal["continue", "raise"] = setting(
        CHECKPOINTS,
        "continue",
        'What to do when a checkpoint cannot be written: "continue" warns, and saves again when the next '
        'checkpoint is due; "raise" ends the run.',
    )
    on_exception: Literal["save", "raise"] = setting(
        CHECKPOINTS,
        "save",
        'What to do when an error, such as one in the dataset, ends the run between two updates: "save" writes a '
        "checkpoint of the state after the last update (if `output_dir` is set; on several ranks, if all of them "
        'raise), "raise" writes none.',
    )
    on_nonfinite: Literal["raise", "skip", "rewind"] = setting(
        CHECKPOINTS,
        "raise",
        'What to do when a loss or gradient is NaN or Inf, which never changes a weight: "raise" ends the run, '
        '"skip" skips the update, "rewind" loads the last checkpoint and skips this update when it comes again.',
    )
    max_nonfinite: int = setting(
        CHECKPOINTS,
        10,
        "How many updates a run may skip because of NaN, Inf or loss spikes, before it ends with an error.",
        check=checks.whole(hint=' For none, give on_nonfinite="raise".'),
    )
    loss_spike: float | None = setting(
        CHECKPOINTS,
        None,
        "A loss this many deviations above the median of the last 50 updates is treated like NaN; `None` ignores "
        "spikes.",
        check=checks.number(above=1),
    )
    hang_timeout: str | float | timedelta | None = setting(
        CHECKPOINTS,
        "10 minutes",
        "Time without progress after which the run ends and names the rank that hangs: seconds, or a text such as "
        '"10 minutes"; `None` turns hang detection off.',
        check=checks.duration,
        on_resume=OnResume.SILENT,
    )
    keep_last: int | None = setting(
        CHECKPOINTS,
        3,
        "How many of the newest checkpoints to keep; `None` keeps all.",
        check=checks.whole(hint=" To keep all, give None."),
    )
    keep_best: int = setting(
        CHECKPOINTS,
        1,
        "How many of the best checkpoints to keep in addition; with 0 a new best metric does not save a checkpoint, "
        "and the best of the saved ones is kept.",
        check=checks.whole(at_least=0, hint=" To keep all checkpoints, give keep_last=None."),
    )
    keep_every: Interval | None = setting(
        CHECKPOINTS,
        None,
        'How often to keep a checkpoint permanently, such as "1000 steps": the first one saved at or after each '
        "multiple; `None` keeps none permanently.",
        check=checks.amount,
    )
    metric_for_best: str | None = setting(
        CHECKPOINTS,
        None,
        "The metric by which checkpoints are ranked; `None` uses the evaluation loss. With several sets, "
        '"mean_loss" or another "mean_…" is the mean over them.',
    )
    greater_is_better: bool | None = setting(
        CHECKPOINTS, None, "Whether higher is better; inferred for common metric names."
    )
    load_best_at_end: bool = setting(CHECKPOINTS, False, "Load the best checkpoint when training ends.")

    shuffle: bool = setting(
        DATA, True, "Shuffle the samples, in a new order for each epoch.", on_resume=OnResume.REFUSED
    )
    num_workers: CountOrAuto = setting(
        DATA,
        0,
        'Worker processes that load data for each rank; 0 loads in the training process. "auto" measures at the start '
        "how long a batch takes to read, and the banner says what it chose.",
        check=checks.worker_count,
        may_differ=True,
    )
    pin_memory: bool | None = setting(
        DATA,
        None,
        "Load batches into page-locked memory, from which accelerators copy faster; `None` does so if there is an "
        "accelerator.",
    )
    prefetch_factor: int | None = setting(
        DATA,
        None,
        "Batches that each worker loads ahead; `None` uses torch's default.",
        check=checks.whole(),
        may_differ=True,
    )
    persistent_workers: bool = setting(DATA, False, "Keep the workers alive between epochs.", may_differ=True)
    seed_each_sample: bool = setting(
        DATA,
        False,
        "Seed the random generators before each sample from seed, epoch and index (about 7 µs per sample). A dataset "
        "that draws random numbers in workers then resumes bit for bit too.",
    )
    low_memory_shuffle: bool = setting(
        DATA,
        False,
        "Compute the order of an epoch from seed and epoch instead of storing it, for datasets with so many samples "
        "that a permutation does not fit into memory. By default the order is that of Hugging Face's Trainer.",
        on_resume=OnResume.KEPT,
    )
    drop_last: bool = setting(DATA, False, "Drop the last batch of an epoch if it is not full.")
    group_by_length: bool = setting(
        DATA, False, "Put samples of similar length into one batch.", on_resume=OnResume.REFUSED
    )
    remove_unused_columns: bool = setting(
        DATA,
        False,
        "Drop the columns of a dataset that the model's `forward` does not take; False raises an error for them. "
        "Arguments converted from Hugging Face's Trainer set it to True, unless they say otherwise.",
    )
    length_column: str = setting(
        DATA, "length", "The column of the dataset that holds the lengths, if there is one.", on_resume=OnResume.REFUSED
    )
    sample_weights: Sequence[float] | None = setting(
        DATA,
        None,
        "How often each sample is drawn, relative to the others; `None` draws all equally.",
        check=checks.weights,
        on_resume=OnResume.REFUSED,
    )
    validation_split: float | None = setting(
        DATA,
        None,
        "The fraction of `train_dataset` to evaluate on instead of training on it, if no `eval_dataset` is given: "
        "0.1 holds out 10 % of the rows, the same ones for each seed; `None` holds out none.",
        check=checks.share,
        on_resume=OnResume.REFUSED,
    )
    on_bad_sample: Literal["raise", "skip"] = setting(
        DATA,
        "raise",
        'What to do when a sample cannot be read or collated: "raise" ends the run with its index, "skip" skips '
        "the sample, reports it at the end and lists it in `quarantine.jsonl`.",
    )
    max_bad_samples: CountOrShare = setting(
        DATA,
        10,
        "How many samples a run may skip before it ends with an error: a number, or a fraction of the data below 1.",
        check=checks.count_or_share(hint=' For none, give on_bad_sample="raise".'),
    )

    limit_train_batches: int | None = setting(
        DEBUGGING,
        None,
        "Batches of an epoch, at most; `None` sets no limit.",
        check=checks.whole(hint=_BATCHES),
        on_resume=OnResume.REFUSED,
    )
    limit_eval_batches: int | None = setting(
        DEBUGGING,
        None,
        "Batches of an evaluation, at most; `None` sets no limit.",
        check=checks.whole(hint=_EVAL_BATCHES),
    )
    overfit_batches: int | None = setting(
        DEBUGGING,
        None,
        "Train and evaluate on the first n batches only, in a fixed order; `None` uses all.",
        check=checks.whole(hint=" Give a number of batches."),
        on_resume=OnResume.REFUSED,
    )
    dry_run: bool = setting(
        DEBUGGING, False, "Train, evaluate and log once on two batches, and write nothing.", on_resume=OnResume.SILENT
    )
    label_names: Sequence[str] | None = setting(
        DEBUGGING,
        None,
        'The keys of a batch that hold labels; `None` looks for "labels", "label", "targets", "target" and "y", and '
        "for further labels that a model of transformers takes.",
    )

    predict_with_generate: bool = setting(
        GENERATION,
        False,
        "Call the model's `generate` in evaluations and predictions, which then read samples in the order of their "
        "lengths.",
    )
    generation_kwargs: dict[str, Any] = setting(
        GENERATION,
        {},
        "Arguments of `generate`: `max_length`, `num_beams`, …; a `generation_config` may be an object, a folder or a "
        "name on the Hub.",
    )

    progress_bar: bool | None = setting(
        TRACKERS,
        None,
        "Show a progress bar; `None` shows it in terminals and notebooks.",
        on_resume=OnResume.SILENT,
        may_differ=True,
    )
    report_to: Sequence[str] = setting(
        TRACKERS,
        (),
        'The trackers to report to, by name: "tensorboard", "mlflow", "comet_ml", "wandb" and others; "all" for '
        "those that are installed and configured.",
        check=checks.reports,
        on_resume=OnResume.SILENT,
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        super().__post_init__()
        check_rules(self)

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
        return None if self.max_tokens is None else checks.read_tokens("max_tokens", self.max_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit or an interval is given in tokens."""
        intervals = (self.log_interval, self.eval_interval, self.save_interval, *self.eval_intervals.values())
        return self.max_tokens is not None or any(every is not None and every.unit == "tokens" for every in intervals)

    @property
    def time_limit(self) -> float | None:
        """The seconds after which the run ends; `None`: no limit."""
        return None if self.max_time is None else checks.read_duration("max_time", self.max_time)

    @property
    def hang_timeout_seconds(self) -> float | None:
        """The seconds without progress after which a rank counts as hung; `None`: no limit."""
        return None if self.hang_timeout is None else checks.read_duration("hang_timeout", self.hang_timeout)

    @property
    def eval_batch_size(self) -> int:
        """The samples in an evaluation batch of a rank."""
        return self.per_device_eval_batch_size or self.train_batch_size_for(1)

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights are updated while the backward runs."""
        return self.optimizer_in_backward or steps_in_backward(self.optimizer)

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
        return checks.warmup_steps(self.warmup, total_steps)

    def effective(self) -> "TrainingArguments":
        """Return the arguments that a run uses: those that `dry_run` implies, if it is set.

        A dry run trains one epoch of two batches, evaluates on two, logs each step and writes nothing: `output_dir`
        and what depends on it are unset. The schedule stays that of the whole run if `schedule_steps` or `max_steps`
        gives its length; if not, a warm-up and a decay in steps are dropped.

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
        if steps is None and self.warmup is not None and isinstance(checks.read_warmup("warmup", self.warmup), int):
            changes["warmup"] = None
        if steps is None and self.lr_scheduler == "wsd":
            options = self.lr_scheduler_kwargs
            changes["lr_scheduler_kwargs"] = {name: options[name] for name in options if name != "decay_steps"}
        return dataclasses.replace(self, **changes)

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
