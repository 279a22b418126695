# Written by python -m tests.trainer.arguments.write_pages: editors show the sentence of each argument.
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Self
from typing_extensions import TypeAliasType
import trainer_lib
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.duration import Every
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.trainer.arguments.base import ArgumentsBase

Interval = int | str | timedelta | Every
CountOrAuto = TypeAliasType('CountOrAuto', int | Literal['auto'])
CountOrShare = TypeAliasType('CountOrShare', int | float)
FlagOrPlugin = TypeAliasType('FlagOrPlugin', bool | FullyShardedDataParallelPlugin)
RUN: str
LENGTH: str
BATCHES: str
OPTIMIZER: str
DEVICES: str
CHECKPOINTS: str
DATA: str
DEBUGGING: str
GENERATION: str
TRACKERS: str

@dataclass(kw_only=True, repr=False, eq=False)
class TrainingArguments(ArgumentsBase):
    """All settings of a run that can be written as text or numbers, checked when you create it.

    Amounts of training are texts with a unit: "500 steps", "1 epoch", "100k samples", "10 minutes"; a bare number means
    optimizer steps. Arguments with the same meaning as in Hugging Face's Trainer have the same names; for each other
    one, an error names the argument to use instead. Values are stored as files hold them: paths and intervals as texts,
    numbers as Python numbers.

    Args:
        output_dir: The folder in which each run creates its own subfolder: a path, or a URL such as `s3://bucket/runs`;
            `None` writes nothing.
        run_name: A display name for the run.
        resume: Which run to resume: "never" starts a new one, "auto" resumes the newest run in `output_dir` of the same
            model and data, "extend" also resumes a finished one that now has more epochs or steps to train, and a path
            resumes that checkpoint.
        seed: The seed for weights, dropout and the order of the data; `None` seeds nothing.
        data_seed: The seed for the order of the data alone; `None` uses `seed`.

        num_train_epochs: Epochs to train, fractions allowed. The run ends at the first limit reached of this,
            `max_steps`, `max_tokens` and `max_time`; with none of them, after 3 epochs.
        max_steps: Optimizer steps after which the run ends; `None` sets no limit.
        max_tokens: Tokens after which the run ends, a number or a text such as "10B". Counted are the `input_ids` of
            all ranks, without the padding that `attention_mask` marks; `None` sets no limit.
        max_time: Training time after which the run ends, summed over restarts: "90 minutes", "1-12:00:00", seconds or a
            `timedelta`; `None` sets no limit.
        deadline: The time by which the program must have ended, including its last checkpoint: a date and time
            ("2030-01-31T18:00"), seconds since 1970, or "auto" for the end of the SLURM job, if there is one. The run
            saves in time, exits with code 75, and can be resumed; `None` sets no deadline.
        stop_signals: The signals, by name, on which the run saves a checkpoint and ends.

        per_device_train_batch_size: Samples in the micro-batch of a rank. "auto" takes 64 (or a divisor of
            `global_batch_size`) and splits a micro-batch that does not fit into memory; the updates stay the same.
        per_device_eval_batch_size: Samples in an evaluation batch of a rank; `None` uses the training batch size.
        gradient_accumulation_steps: Micro-batches that a rank accumulates for one optimizer step; `None` means 1.
        global_batch_size: Samples in one optimizer step, over all ranks; the accumulation steps follow from it. `None`
            uses `gradient_accumulation_steps`.

        learning_rate: The learning rate at the end of the warm-up.
        optimizer: The optimizer: "adamw", "sgd" or another optimizer of torch in lower case, "muon", "galore_adamw",
            "apollo_adamw", "lomo" or "adalomo", one of bitsandbytes, torchao or schedulefree ("adamw_8bit",
            "schedule_free_adamw"), or a dotted path.
        optimizer_kwargs: Further arguments of the optimizer, such as {"betas": [0.9, 0.95]}.
        weight_decay: The weight decay for all parameters except norms, biases and vectors.
        parameter_groups: A list of `ParameterGroup`: learning rate, weight decay or freezing for the parameters whose
            names match a pattern.
        lr_scheduler: The learning rate schedule: "linear", "cosine", "wsd", "constant", "plateau" or another name, or a
            dotted path.
        lr_scheduler_kwargs: Further arguments of the schedule.
        warmup: Steps over which the learning rate rises from 0: a number ("100 steps" or 100) or a fraction of all
            steps (0.05 or "5%"); `None` means no warm-up.
        schedule_steps: Optimizer steps over which the schedule runs; `None` uses the length of the run.
        max_grad_norm: The norm to which gradients are clipped; `None` does not clip.

        mixed_precision: "no", "fp16", "bf16", "fp8", or "bf16-true" for weights in bf16; `None` uses what the launcher
            set.
        fp8: Options of `mixed_precision="fp8"`, as `AORecipeKwargs`: which layers, and how.
        compile: Compile the model with torch.compile: True, the name of a backend, or a `TorchDynamoPlugin`.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them.
        gradient_checkpointing_every: With `gradient_checkpointing`, recompute the activations of every n-th block only,
            which saves less memory and computes less twice.
        gradient_checkpointing_policy: With `gradient_checkpointing`, the operations whose outputs are kept instead of
            recomputed: "matmul" (matrix products with weights, and fused attention), "attention", or a list of names
            such as ["aten.mm"]; `None` keeps none.
        activation_offload: Keep the activations of blocks in host memory until the backward; with
            `gradient_checkpointing`, the inputs that they are recomputed from.
        optimizer_in_backward: Update each parameter in the backward, as soon as its gradient is complete, and free the
            gradient. Works on one device, with FSDP2, or with `tp_size` alone, without accumulation and clipping.
        chunked_cross_entropy: Compute the loss of a causal language model of transformers for 512 tokens at a time, so
            that all its logits are never in memory at once; the results stay the same.
        use_liger_kernel: Replace layers of a transformers model by Liger's kernels, on GPUs (`pip install
            liger-kernel`).
        device_map: Spread the model over the devices of one process, to evaluate and predict with it: "auto",
            "balanced", "balanced_low_0" or "sequential", or the device of each module by name.
        max_memory: With a named `device_map` such as "auto": the memory of each device that the model may use, such as
            {0: "10GB", "cpu": "30GB"}.
        offload_folder: With `device_map`: the folder for weights that are offloaded to disk.
        fsdp: Shard the model with FSDP2: True, or a `FullyShardedDataParallelPlugin`.
        deepspeed: Shard the model with DeepSpeed's ZeRO: the path of its JSON file, the values as a dict, or a
            `DeepSpeedPlugin`. Arguments fill the values that are "auto".
        parallelism: A `ParallelismConfig`: how many ranks replicate the model and how many share one copy.
        ddp: Options of DDP, as `DistributedDataParallelKwargs`.
        local_sgd_steps: Optimizer steps that each rank takes alone, without reducing gradients, before the ranks
            average their weights; `None` reduces gradients in each step.
        outer_learning_rate: With `local_sgd_steps`: the learning rate of an outer step of SGD with Nesterov momentum on
            the averages (DiLoCo), such as 0.7; `None` takes the averages as they are.
        outer_momentum: With `outer_learning_rate`: the Nesterov momentum of the outer step; `None` means 0.9.
        sync_batchnorm: Compute BatchNorm's statistics over the batches of all ranks (SyncBatchNorm).
        tf32: Whether accelerators may multiply in TF32; `None` keeps torch's setting.
        deterministic: Use only algorithms that return the same result every time.
        detect_anomaly: Find the operation whose gradient is NaN (torch's anomaly detection); slow.
        gc_every: How often Python's garbage collector runs, on all ranks at once; `None` leaves it to Python.
        use_cpu: Train on the CPU even if an accelerator is available.

        log_every: How often to log, or "never".
        eval_every: How often to evaluate, or "never"; `None` evaluates each epoch if there is an evaluation set. For
            several sets, a mapping by name: {"dev": "100 steps", "test": "1 epoch", "train": "never"}.
        eval_delay: How long to train before the first scheduled evaluation, such as "2 epochs"; `None` means no delay.
        eval_on_start: Evaluate before the first step too.
        save_every: How often to save a checkpoint, or "never"; `None` saves each epoch if there is an `output_dir`.
        save_in_background: Write checkpoints in a thread, from a copy in host memory, while training continues.
        on_save_error: What to do when a checkpoint cannot be written: "continue" warns, and saves again when the next
            checkpoint is due; "raise" ends the run.
        on_exception: What to do when an error, such as one in the dataset, ends the run between two updates: "save"
            writes a checkpoint of the state after the last update (if `output_dir` is set; on several ranks, if all of
            them raise), "raise" writes none.
        on_nonfinite: What to do when a loss or gradient is NaN or Inf, which never changes a weight: "raise" ends the
            run, "skip" skips the update, "rewind" loads the last checkpoint and skips this update when it comes again.
        max_nonfinite: How many updates a run may skip because of NaN, Inf or loss spikes, before it ends with an error.
        loss_spike: A loss this many deviations above the median of the last 50 updates is treated like NaN; `None`
            ignores spikes.
        hang_timeout: Time without progress after which the run ends and names the rank that hangs: seconds, or a text
            such as "10 minutes"; `None` turns hang detection off.
        keep_last: How many of the newest checkpoints to keep; `None` keeps all.
        keep_best: How many of the best checkpoints to keep in addition; with 0 a new best metric does not save a
            checkpoint, and the best of the saved ones is kept.
        keep_every: How often to keep a checkpoint permanently, such as "1000 steps": the first one saved at or after
            each multiple; `None` keeps none permanently.
        metric_for_best: The metric by which checkpoints are ranked; `None` uses the evaluation loss. With several sets,
            "mean_loss" or another "mean_…" is the mean over them.
        greater_is_better: Whether higher is better; inferred for common metric names.
        load_best_at_end: Load the best checkpoint when training ends.

        shuffle: Shuffle the samples, in a new order for each epoch.
        num_workers: Worker processes that load data for each rank; 0 loads in the training process. "auto" measures at
            the start how long a batch takes to read, and the banner says what it chose.
        pin_memory: Load batches into page-locked memory, from which accelerators copy faster; `None` does so if there
            is an accelerator.
        prefetch_factor: Batches that each worker loads ahead; `None` uses torch's default.
        persistent_workers: Keep the workers alive between epochs.
        seed_each_sample: Seed the random generators before each sample from seed, epoch and index (about 7 µs per
            sample). A dataset that draws random numbers in workers then resumes bit for bit too.
        low_memory_shuffle: Compute the order of an epoch from seed and epoch instead of storing it, for datasets with
            so many samples that a permutation does not fit into memory. By default the order is that of Hugging Face's
            Trainer.
        drop_last: Drop the last batch of an epoch if it is not full.
        group_by_length: Put samples of similar length into one batch.
        remove_unused_columns: Drop the columns of a dataset that the model's `forward` does not take; False raises an
            error for them. Arguments converted from Hugging Face's Trainer set it to True, unless they say otherwise.
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
        overfit_batches: Train and evaluate on the first n batches only, in a fixed order; `None` uses all.
        dry_run: Train, evaluate and log once on two batches, and write nothing.
        label_names: The keys of a batch that hold labels; `None` looks for "labels", "label", "targets", "target" and
            "y", and for further labels that a model of transformers takes.

        predict_with_generate: Call the model's `generate` in evaluations and predictions, which then read samples in
            the order of their lengths.
        generation_kwargs: Arguments of `generate`: `max_length`, `num_beams`, …; a `generation_config` may be an
            object, a folder or a name on the Hub.

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

    output_dir: os.PathLike[str] | str | None = None
    """The folder in which each run creates its own subfolder: a path, or a URL such as `s3://bucket/runs`; `None`
    writes nothing.
    """
    run_name: str | None = None
    """A display name for the run."""
    resume: str | os.PathLike[str] = 'never'
    """Which run to resume: "never" starts a new one, "auto" resumes the newest run in `output_dir` of the same model
    and data, "extend" also resumes a finished one that now has more epochs or steps to train, and a path resumes
    that checkpoint.
    """
    seed: int | None = 42
    """The seed for weights, dropout and the order of the data; `None` seeds nothing."""
    data_seed: int | None = None
    """The seed for the order of the data alone; `None` uses `seed`."""
    num_train_epochs: float | None = None
    """Epochs to train, fractions allowed. The run ends at the first limit reached of this, `max_steps`, `max_tokens`
    and `max_time`; with none of them, after 3 epochs.
    """
    max_steps: int | None = None
    """Optimizer steps after which the run ends; `None` sets no limit."""
    max_tokens: int | str | None = None
    """Tokens after which the run ends, a number or a text such as "10B". Counted are the `input_ids` of all ranks,
    without the padding that `attention_mask` marks; `None` sets no limit.
    """
    max_time: float | timedelta | str | None = None
    """Training time after which the run ends, summed over restarts: "90 minutes", "1-12:00:00", seconds or a
    `timedelta`; `None` sets no limit.
    """
    deadline: str | float | datetime | None = 'auto'
    """The time by which the program must have ended, including its last checkpoint: a date and time
    ("2030-01-31T18:00"), seconds since 1970, or "auto" for the end of the SLURM job, if there is one. The run saves
    in time, exits with code 75, and can be resumed; `None` sets no deadline.
    """
    stop_signals: Sequence[str] = ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1']
    """The signals, by name, on which the run saves a checkpoint and ends."""
    per_device_train_batch_size: CountOrAuto = 8
    """Samples in the micro-batch of a rank. "auto" takes 64 (or a divisor of `global_batch_size`) and splits a
    micro-batch that does not fit into memory; the updates stay the same.
    """
    per_device_eval_batch_size: int | None = None
    """Samples in an evaluation batch of a rank; `None` uses the training batch size."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches that a rank accumulates for one optimizer step; `None` means 1."""
    global_batch_size: int | None = None
    """Samples in one optimizer step, over all ranks; the accumulation steps follow from it. `None` uses
    `gradient_accumulation_steps`.
    """
    learning_rate: float = 5e-05
    """The learning rate at the end of the warm-up."""
    optimizer: str = 'adamw'
    """The optimizer: "adamw", "sgd" or another optimizer of torch in lower case, "muon", "galore_adamw",
    "apollo_adamw", "lomo" or "adalomo", one of bitsandbytes, torchao or schedulefree ("adamw_8bit",
    "schedule_free_adamw"), or a dotted path.
    """
    optimizer_kwargs: dict[str, Any] = {}
    """Further arguments of the optimizer, such as {"betas": [0.9, 0.95]}."""
    weight_decay: float = 0.0
    """The weight decay for all parameters except norms, biases and vectors."""
    parameter_groups: 'Sequence[trainer_lib.ParameterGroup]' = []
    """A list of `ParameterGroup`: learning rate, weight decay or freezing for the parameters whose names match a
    pattern.
    """
    lr_scheduler: str = 'linear'
    """The learning rate schedule: "linear", "cosine", "wsd", "constant", "plateau" or another name, or a dotted path."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """Further arguments of the schedule."""
    warmup: int | float | str | None = None
    """Steps over which the learning rate rises from 0: a number ("100 steps" or 100) or a fraction of all steps (0.05
    or "5%"); `None` means no warm-up.
    """
    schedule_steps: int | None = None
    """Optimizer steps over which the schedule runs; `None` uses the length of the run."""
    max_grad_norm: float | None = 1.0
    """The norm to which gradients are clipped; `None` does not clip."""
    mixed_precision: Literal['no', 'fp16', 'bf16', 'bf16-true', 'fp8'] | None = None
    """"no", "fp16", "bf16", "fp8", or "bf16-true" for weights in bf16; `None` uses what the launcher set."""
    fp8: 'trainer_lib.AORecipeKwargs | None' = None
    """Options of `mixed_precision="fp8"`, as `AORecipeKwargs`: which layers, and how."""
    compile: bool | str | TorchDynamoPlugin = False
    """Compile the model with torch.compile: True, the name of a backend, or a `TorchDynamoPlugin`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    gradient_checkpointing_every: int = 1
    """With `gradient_checkpointing`, recompute the activations of every n-th block only, which saves less memory and
    computes less twice.
    """
    gradient_checkpointing_policy: Sequence[str] | str | None = None
    """With `gradient_checkpointing`, the operations whose outputs are kept instead of recomputed: "matmul" (matrix
    products with weights, and fused attention), "attention", or a list of names such as ["aten.mm"]; `None` keeps
    none.
    """
    activation_offload: bool = False
    """Keep the activations of blocks in host memory until the backward; with `gradient_checkpointing`, the inputs that
    they are recomputed from.
    """
    optimizer_in_backward: bool = False
    """Update each parameter in the backward, as soon as its gradient is complete, and free the gradient. Works on one
    device, with FSDP2, or with `tp_size` alone, without accumulation and clipping.
    """
    chunked_cross_entropy: bool = False
    """Compute the loss of a causal language model of transformers for 512 tokens at a time, so that all its logits are
    never in memory at once; the results stay the same.
    """
    use_liger_kernel: bool = False
    """Replace layers of a transformers model by Liger's kernels, on GPUs (`pip install liger-kernel`)."""
    device_map: Mapping[str, int | str] | str | None = None
    """Spread the model over the devices of one process, to evaluate and predict with it: "auto", "balanced",
    "balanced_low_0" or "sequential", or the device of each module by name.
    """
    max_memory: Mapping[int | str, int | str] | None = None
    """With a named `device_map` such as "auto": the memory of each device that the model may use, such as {0: "10GB",
    "cpu": "30GB"}.
    """
    offload_folder: os.PathLike[str] | str | None = None
    """With `device_map`: the folder for weights that are offloaded to disk."""
    fsdp: FlagOrPlugin | None = None
    """Shard the model with FSDP2: True, or a `FullyShardedDataParallelPlugin`."""
    deepspeed: 'str | trainer_lib.DeepSpeedPlugin | os.PathLike[str] | dict[str, Any] | None' = None
    """Shard the model with DeepSpeed's ZeRO: the path of its JSON file, the values as a dict, or a `DeepSpeedPlugin`.
    Arguments fill the values that are "auto".
    """
    parallelism: 'trainer_lib.ParallelismConfig | None' = None
    """A `ParallelismConfig`: how many ranks replicate the model and how many share one copy."""
    ddp: DistributedDataParallelKwargs | None = None
    """Options of DDP, as `DistributedDataParallelKwargs`."""
    local_sgd_steps: int | None = None
    """Optimizer steps that each rank takes alone, without reducing gradients, before the ranks average their weights;
    `None` reduces gradients in each step.
    """
    outer_learning_rate: float | None = None
    """With `local_sgd_steps`: the learning rate of an outer step of SGD with Nesterov momentum on the averages
    (DiLoCo), such as 0.7; `None` takes the averages as they are.
    """
    outer_momentum: float | None = None
    """With `outer_learning_rate`: the Nesterov momentum of the outer step; `None` means 0.9."""
    sync_batchnorm: bool = False
    """Compute BatchNorm's statistics over the batches of all ranks (SyncBatchNorm)."""
    tf32: bool | None = None
    """Whether accelerators may multiply in TF32; `None` keeps torch's setting."""
    deterministic: bool = False
    """Use only algorithms that return the same result every time."""
    detect_anomaly: bool = False
    """Find the operation whose gradient is NaN (torch's anomaly detection); slow."""
    gc_every: Interval | None = None
    """How often Python's garbage collector runs, on all ranks at once; `None` leaves it to Python."""
    use_cpu: bool = False
    """Train on the CPU even if an accelerator is available."""
    log_every: Interval = '50 steps'
    """How often to log, or "never"."""
    eval_every: Interval | Mapping[str, Interval] | None = None
    """How often to evaluate, or "never"; `None` evaluates each epoch if there is an evaluation set. For several sets,
    a mapping by name: {"dev": "100 steps", "test": "1 epoch", "train": "never"}.
    """
    eval_delay: int | str | Every | None = None
    """How long to train before the first scheduled evaluation, such as "2 epochs"; `None` means no delay."""
    eval_on_start: bool = False
    """Evaluate before the first step too."""
    save_every: Interval | None = None
    """How often to save a checkpoint, or "never"; `None` saves each epoch if there is an `output_dir`."""
    save_in_background: bool = True
    """Write checkpoints in a thread, from a copy in host memory, while training continues."""
    on_save_error: Literal['continue', 'raise'] = 'continue'
    """What to do when a checkpoint cannot be written: "continue" warns, and saves again when the next checkpoint is
    due; "raise" ends the run.
    """
    on_exception: Literal['save', 'raise'] = 'save'
    """What to do when an error, such as one in the dataset, ends the run between two updates: "save" writes a
    checkpoint of the state after the last update (if `output_dir` is set; on several ranks, if all of them raise),
    "raise" writes none.
    """
    on_nonfinite: Literal['raise', 'skip', 'rewind'] = 'raise'
    """What to do when a loss or gradient is NaN or Inf, which never changes a weight: "raise" ends the run, "skip"
    skips the update, "rewind" loads the last checkpoint and skips this update when it comes again.
    """
    max_nonfinite: int = 10
    """How many updates a run may skip because of NaN, Inf or loss spikes, before it ends with an error."""
    loss_spike: float | None = None
    """A loss this many deviations above the median of the last 50 updates is treated like NaN; `None` ignores spikes."""
    hang_timeout: str | float | timedelta | None = '10 minutes'
    """Time without progress after which the run ends and names the rank that hangs: seconds, or a text such as "10
    minutes"; `None` turns hang detection off.
    """
    keep_last: int | None = 3
    """How many of the newest checkpoints to keep; `None` keeps all."""
    keep_best: int = 1
    """How many of the best checkpoints to keep in addition; with 0 a new best metric does not save a checkpoint, and
    the best of the saved ones is kept.
    """
    keep_every: Interval | None = None
    """How often to keep a checkpoint permanently, such as "1000 steps": the first one saved at or after each multiple;
    `None` keeps none permanently.
    """
    metric_for_best: str | None = None
    """The metric by which checkpoints are ranked; `None` uses the evaluation loss. With several sets, "mean_loss" or
    another "mean_…" is the mean over them.
    """
    greater_is_better: bool | None = None
    """Whether higher is better; inferred for common metric names."""
    load_best_at_end: bool = False
    """Load the best checkpoint when training ends."""
    shuffle: bool = True
    """Shuffle the samples, in a new order for each epoch."""
    num_workers: CountOrAuto = 0
    """Worker processes that load data for each rank; 0 loads in the training process. "auto" measures at the start how
    long a batch takes to read, and the banner says what it chose.
    """
    pin_memory: bool | None = None
    """Load batches into page-locked memory, from which accelerators copy faster; `None` does so if there is an
    accelerator.
    """
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead; `None` uses torch's default."""
    persistent_workers: bool = False
    """Keep the workers alive between epochs."""
    seed_each_sample: bool = False
    """Seed the random generators before each sample from seed, epoch and index (about 7 µs per sample). A dataset that
    draws random numbers in workers then resumes bit for bit too.
    """
    low_memory_shuffle: bool = False
    """Compute the order of an epoch from seed and epoch instead of storing it, for datasets with so many samples that
    a permutation does not fit into memory. By default the order is that of Hugging Face's Trainer.
    """
    drop_last: bool = False
    """Drop the last batch of an epoch if it is not full."""
    group_by_length: bool = False
    """Put samples of similar length into one batch."""
    remove_unused_columns: bool = False
    """Drop the columns of a dataset that the model's `forward` does not take; False raises an error for them.
    Arguments converted from Hugging Face's Trainer set it to True, unless they say otherwise.
    """
    length_column: str = 'length'
    """The column of the dataset that holds the lengths, if there is one."""
    sample_weights: Sequence[float] | None = None
    """How often each sample is drawn, relative to the others; `None` draws all equally."""
    validation_split: float | None = None
    """The fraction of `train_dataset` to evaluate on instead of training on it, if no `eval_dataset` is given: 0.1
    holds out 10 % of the rows, the same ones for each seed; `None` holds out none.
    """
    on_bad_sample: Literal['raise', 'skip'] = 'raise'
    """What to do when a sample cannot be read or collated: "raise" ends the run with its index, "skip" skips the
    sample, reports it at the end and lists it in `quarantine.jsonl`.
    """
    max_bad_samples: CountOrShare = 10
    """How many samples a run may skip before it ends with an error: a number, or a fraction of the data below 1."""
    limit_train_batches: int | None = None
    """Batches of an epoch, at most; `None` sets no limit."""
    limit_eval_batches: int | None = None
    """Batches of an evaluation, at most; `None` sets no limit."""
    overfit_batches: int | None = None
    """Train and evaluate on the first n batches only, in a fixed order; `None` uses all."""
    dry_run: bool = False
    """Train, evaluate and log once on two batches, and write nothing."""
    label_names: Sequence[str] | None = None
    """The keys of a batch that hold labels; `None` looks for "labels", "label", "targets", "target" and "y", and for
    further labels that a model of transformers takes.
    """
    predict_with_generate: bool = False
    """Call the model's `generate` in evaluations and predictions, which then read samples in the order of their
    lengths.
    """
    generation_kwargs: dict[str, Any] = {}
    """Arguments of `generate`: `max_length`, `num_beams`, …; a `generation_config` may be an object, a folder or a
    name on the Hub.
    """
    progress_bar: bool | None = None
    """Show a progress bar; `None` shows it in terminals and notebooks."""
    report_to: Sequence[str] = ()
    """The trackers to report to, by name: "tensorboard", "mlflow", "comet_ml", "wandb" and others; "all" for those
    that are installed and configured.
    """

    @property
    def output_folder(self) -> AnyPath | None:
        """The folder in which runs are written; `None`: nothing is written."""

    @property
    def epoch_limit(self) -> float | None:
        """The epochs after which the run ends: 3 if no other limit is set; `None`: no limit."""

    @property
    def token_limit(self) -> int | None:
        """The tokens after which the run ends; `None`: no limit."""

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit or an interval is given in tokens."""

    @property
    def time_limit(self) -> float | None:
        """The seconds after which the run ends; `None`: no limit."""

    @property
    def hang_timeout_seconds(self) -> float | None:
        """The seconds without progress after which a rank counts as hung; `None`: no limit."""

    @property
    def eval_batch_size(self) -> int:
        """The samples in an evaluation batch of a rank."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights are updated while the backward runs."""

    def train_batch_size_for(self, num_processes: int) -> int:
        """Return the samples in a training batch of a rank; "auto" is 64, or near it a divisor of `global_batch_size`.

        Raises:
            ConfigurationError: If `num_processes` does not divide `global_batch_size`.

        Example:
            >>> args = TrainingArguments(per_device_train_batch_size="auto", global_batch_size=192)
            >>> args.train_batch_size_for(1), args.train_batch_size_for(4)
            (64, 48)
        """

    @property
    def log_interval(self) -> Every | None:
        """How often to log; `None`: never."""

    @property
    def eval_interval(self) -> Every | None:
        """How often to evaluate, if there is something to evaluate on; `None`: never.

        If sets have different intervals, this is the first of them: `eval_intervals` has all.
        """

    @property
    def eval_intervals(self) -> dict[str, Every | None]:
        """How often to evaluate each set, by name (`None`: never); empty if all sets share `eval_interval`."""

    @property
    def evaluation_delay(self) -> Every | None:
        """How much to train before the first scheduled evaluation; `None`: no delay."""

    @property
    def save_interval(self) -> Every | None:
        """How often to save; `None`: never."""

    @property
    def gc_interval(self) -> Every | None:
        """How often to collect garbage; `None`: when Python does."""

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

    def effective(self) -> 'TrainingArguments':
        """Return the arguments that a run uses: those that `dry_run` implies, if it is set.

        A dry run trains one epoch of two batches, evaluates on two, logs each step and writes nothing: `output_dir`
        and what depends on it are unset. The schedule stays that of the whole run if `schedule_steps` or `max_steps`
        gives its length; if not, a warm-up and a decay in steps are dropped.

        Example:
            >>> args = TrainingArguments(dry_run=True, max_steps=1000, output_dir="runs").effective()
            >>> args.limit_train_batches, args.num_train_epochs, args.max_steps, args.output_dir
            (2, 1, None, None)
        """

    @classmethod
    def from_transformers(cls, arguments: Any) -> Self:
        """Return the arguments of a `transformers.TrainingArguments`, with a warning for those that have no equivalent.

        An argument at Hugging Face's default takes the default of this class, except `remove_unused_columns`: datasets
        made for that trainer may need it.

        Args:
            arguments: The arguments of Hugging Face's Trainer.
        """
