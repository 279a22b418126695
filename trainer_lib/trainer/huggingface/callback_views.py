"""A run's state and arguments as objects of Hugging Face's classes, for its callbacks."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from trainer_lib.events import Run
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.metric_names import greater_is_better_for

_SAME = (
    "learning_rate",
    "weight_decay",
    "run_name",
    "seed",
    "data_seed",
    "predict_with_generate",
    "label_names",
    "use_cpu",
    "gradient_checkpointing",
)
_OTHERWISE = {
    "max_grad_norm": "max_grad_norm",
    "save_total_limit": "keep_last",
    "full_determinism": "deterministic",
    "load_best_model_at_end": "load_best_at_end",
    "dataloader_num_workers": "num_workers",
    "dataloader_drop_last": "drop_last",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
# Properties that would set up devices and processes when read.
_OF_PROCESS = ("device", "n_gpu", "world_size", "process_index", "local_process_index", "parallel_mode")


def new_state(run: Run) -> Any:
    """Return a `TrainerState` with the values that are constant over a run; `update_state` sets the others."""
    from transformers.trainer_callback import TrainerState

    here, args = run.state, run.args
    return TrainerState(
        max_steps=here.max_steps or 0,
        num_train_epochs=_passes(here.max_epochs, here.max_steps, here.steps_per_epoch),
        logging_steps=_steps(args.log_interval),
        eval_steps=_steps(args.eval_interval),
        save_steps=_steps(args.save_interval),
        train_batch_size=args.train_batch_size_for(run.accelerator.data_group.size),
        is_world_process_zero=run.is_main_process,
        is_local_process_zero=run.accelerator.is_local_main_process,
    )


def update_state(
    state: Any, run: Run, logged: Mapping[str, Any] | None = None, saved: Mapping[str, Any] | None = None
) -> None:
    """Update a `TrainerState` from a run.

    Args:
        state: The state.
        run: The run.
        logged: The values being logged, which are not in the run's history yet.
        saved: The checkpoint that was saved; a background save may be of an earlier step.
    """
    here = run.state
    state.global_step, state.epoch = (here.step, here.epochs) if saved is None else (saved["step"], saved["epoch"])
    state.log_history = here.history if logged is None else [*here.history, {**logged, "step": here.step}]
    if here.best is not None:
        state.best_metric, state.best_global_step = here.best.value, here.best.step
        state.best_model_checkpoint = next(
            (str(checkpoint["path"]) for checkpoint in here.checkpoints if checkpoint["step"] == here.best.step), None
        )


def arguments_view(run: Run) -> Any:
    """Return a `transformers.TrainingArguments` with a run's arguments, as far as it has equivalents."""
    kind = _arguments_class()
    args = object.__new__(kind)  # its constructor would set up devices
    for field in dataclasses.fields(kind):
        default: Any = field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        setattr(args, field.name, default)
    for name, value in {**_plain(run), **_intervals(run), **_of_metric(run), **_of_process(run)}.items():
        setattr(args, name, value)
    return args


def _plain(run: Run) -> dict[str, Any]:
    ours, ranks = run.args, run.accelerator.data_group.size
    names = {**dict(zip(_SAME, _SAME, strict=True)), **_OTHERWISE}
    return {
        **{theirs: getattr(ours, name) for theirs, name in names.items()},
        "output_dir": str(run.folder or ours.output_dir or "trainer_output"),
        "max_grad_norm": ours.max_grad_norm or 0.0,
        "max_steps": ours.max_steps or -1,
        "num_train_epochs": ours.epoch_limit or 0,
        "per_device_train_batch_size": ours.train_batch_size_for(ranks),
        "per_device_eval_batch_size": ours.eval_batch_size,
        "gradient_accumulation_steps": run.accelerator.gradient_accumulation_steps,
        "bf16": run.accelerator.mixed_precision == "bf16",
        "fp16": run.accelerator.mixed_precision == "fp16",
        "lr_scheduler_kwargs": dict(ours.lr_scheduler_kwargs),
        "report_to": list(ours.report_to),
        "disable_tqdm": ours.progress_bar is False,
        "remove_unused_columns": ours.remove_unused_columns,
    }


def _intervals(run: Run) -> dict[str, Any]:
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    ours, values = run.args, dict[str, Any]()
    intervals = {
        "logging": ours.log_interval,
        "eval": run.trainer.parts.evaluation.interval,
        "save": ours.save_interval,
    }
    for name, interval in intervals.items():
        strategy = "no" if interval is None else "epoch" if interval.unit == "epochs" else "steps"
        values[f"{name}_strategy"] = (SaveStrategy if name == "save" else IntervalStrategy)(strategy)
        values[f"{name}_steps"] = _steps(interval)
    return values


def _of_metric(run: Run) -> dict[str, Any]:
    metric: str | None = run.trainer.parts.evaluation.best_metric
    if metric is None:
        return {"metric_for_best_model": None, "greater_is_better": None}
    is_more = greater_is_better_for(metric, run.args.greater_is_better)
    return {"metric_for_best_model": metric, "greater_is_better": is_more}


def _of_process(run: Run) -> dict[str, Any]:
    from transformers.training_args import ParallelMode

    accelerator = run.accelerator
    device, world = accelerator.device, accelerator.num_processes
    mode = ParallelMode.DISTRIBUTED if world > 1 else ParallelMode.NOT_PARALLEL
    values = (
        device,
        int(device.type != "cpu"),
        world,
        accelerator.process_index,
        accelerator.local_process_index,
        mode,
    )
    return dict(zip(_OF_PROCESS, values, strict=True))


def _passes(epochs: float | None, steps: int | None, steps_per_epoch: int | None) -> int:
    if epochs is not None:
        return math.ceil(epochs)
    return math.ceil(steps / steps_per_epoch) if steps and steps_per_epoch else 0


def _steps(interval: Every | None) -> int:
    """Return an interval in steps; for other units 500, Hugging Face's default."""
    return int(interval.amount) if interval is not None and interval.unit == "steps" else 500


@functools.cache
def _arguments_class() -> Any:
    from transformers.training_args import TrainingArguments

    # Plain values replace the properties.
    return type("SeenArguments", (TrainingArguments,), dict.fromkeys(_OF_PROCESS))
