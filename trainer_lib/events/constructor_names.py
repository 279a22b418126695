"""Errors for arguments that constructors of shipped callbacks do not have: what other libraries call ours."""

from collections.abc import Mapping, Sequence

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import SignatureError, did_you_mean
from trainer_lib.foundation.public_names.signatures import parameter_names

_SHIPPED = "trainer_lib.callbacks"
_METRIC = {
    "monitor": "metric",
    "mode": "greater_is_better: True for max, False for min",
    "verbose": "Leave it out: the log says it",
}
_ARGUMENTS = "TrainingArguments({})"

# The names of Lightning, Keras and Hugging Face's Trainer.
_INSTEAD: Mapping[str, Mapping[str, str]] = {
    "EarlyStopping": {
        **_METRIC,
        "early_stopping_patience": "patience",
        "early_stopping_threshold": "min_delta",
        "stopping_threshold": "stop_above or stop_below",
        "baseline": "stop_above or stop_below",
        "divergence_threshold": "diverged_above or diverged_below",
        "restore_best_weights": _ARGUMENTS.format("load_best_at_end=True"),
        "start_from_epoch": _ARGUMENTS.format('eval_delay="3 epochs"'),
        "strict": "Leave it out: a metric that is missing is an error",
        "check_on_train_epoch_end": "Leave it out: it looks at each evaluation",
        "log_rank_zero_only": "Leave it out: the main process logs",
    },
    "Checkpoint": {
        **_METRIC,
        "monitor": "metric",
        "dirpath": _ARGUMENTS.format("output_dir=…"),
        "filepath": _ARGUMENTS.format("output_dir=…"),
        "filename": "Leave it out: a checkpoint is named by its step",
        "save_top_k": "keep_best",
        "save_best_only": 'every="never" with keep_best=1',
        "save_last": "keep_last",
        "save_total_limit": "keep_last",
        "every_n_train_steps": 'every="100 steps"',
        "every_n_epochs": 'every="1 epoch"',
        "save_freq": 'every="100 steps"',
        "train_time_interval": 'every="10 minutes"',
        "save_weights_only": "trainer.save_model(folder), which writes only the model",
        "save_on_train_epoch_end": "Leave it out: the best is saved after its evaluation, and others by every",
        "auto_insert_metric_name": "Leave it out: a checkpoint is named by its step",
        "enable_version_counter": "Leave it out: each run has a folder of its own",
    },
    "EMA": {
        "beta": "decay",
        "update_every": "every",
        "update_every_n_steps": "every",
        "use_buffers": "buffers",
        "device": "Leave it out: the average is where the weights are",
    },
    "SWA": {
        "swa_epoch_start": "start",
        "swa_lrs": "a schedule of the Trainer",
        "annealing_epochs": "a schedule of the Trainer",
        "annealing_strategy": "a schedule of the Trainer",
        "device": "Leave it out: the average is where the weights are",
    },
    "Timer": {"duration": _ARGUMENTS.format("max_time=…")},
    "AccumulationSchedule": {"scheduling": "steps"},
    "Throughput": {
        "window_size": _ARGUMENTS.format("log_every=…"),
        "batch_size_fn": "Leave it out: the loader counts samples",
        "length_fn": "tokens",
    },
    "ModelSummary": {"max_depth": "depth"},
    "ProgressBar": {"refresh_rate": "seconds_per_line"},
    "LearningRateMonitor": {"log_momentum": "momentum", "logging_interval": _ARGUMENTS.format("log_every=…")},
    "LabelSmoothing": {"smoothing": "share", "epsilon": "share"},
    "SAM": {"rho": "radius"},
    "TensorBoardCallback": {"log_dir": "folder", "logging_dir": "folder"},
    "MLflowCallback": {"experiment_name": "project"},
    "CometCallback": {"project_name": "project"},
    "NEFTune": {"neftune_noise_alpha": "alpha"},
}


def check_constructor(kind: type, unknown: Sequence[str]) -> None:
    """Raise for names that the constructor of a shipped callback does not take, with what to give instead.

    Constructors of your own raise Python's `TypeError`.

    Raises:
        SignatureError: With the name to use, and the nearest known one.
    """
    owner = next(cls for cls in kind.__mro__ if "__init__" in vars(cls))
    if owner.__module__.startswith(_SHIPPED):
        raise_unknown(owner, unknown, parameter_names(owner))


def raise_unknown(kind: type, unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise for names that a callback does not take, with what to give instead.

    Raises:
        SignatureError: With the name to use, and the nearest known one.
    """
    raise SignatureError("\n".join(_explained(kind, name, known) for name in unknown))


def _explained(kind: type, name: str, known: Sequence[str]) -> str:
    instead = next((_INSTEAD[cls.__name__].get(name) for cls in kind.__mro__ if cls.__name__ in _INSTEAD), None)
    if instead is None:
        hint = did_you_mean(name, known)
    else:
        hint = f" {instead}." if instead.startswith("Leave") else f" Give {instead}."
    return f"{kind.__name__} takes no {shown(name)}.{hint} Known: {', '.join(known) or 'no arguments'}."
