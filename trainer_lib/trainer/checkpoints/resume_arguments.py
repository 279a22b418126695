"""The arguments of a resumed run: which of them changed, and whether the old or the new value counts."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError, StateError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.trainer.arguments import yaml_json
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.publish.save_pretrained import ARGUMENTS_FILE

_logger = get_logger(__name__)

_SHOWN = 80  # characters of a value in a message


class Policy(Enum):
    """What happens on resume to an argument whose value changed."""

    NOW = "the new value counts"
    KEPT = "the checkpoint's value counts"
    REFUSED = "a changed value is an error"
    SILENT = "the new value counts, without a warning"


def _of(policy: Policy, *names: str) -> dict[str, Policy]:
    return dict.fromkeys(names, policy)


# The policy of each argument; the table in docs/trainer.md says the same.
POLICIES: dict[str, Policy] = {
    # Where the run is written and how it is shown.
    **_of(Policy.SILENT, "output_dir", "run_name", "resume", "progress_bar", "report_to", "dry_run"),
    **_of(Policy.SILENT, "deadline", "stop_signals"),
    # The order of the data and the random generators are restored.
    **_of(Policy.KEPT, "seed", "data_seed"),
    # A changed value would make the loader's position mean other samples, or the optimizer's state not fit.
    **_of(Policy.REFUSED, "shuffle", "group_by_length", "length_column", "sample_weights"),
    **_of(Policy.REFUSED, "validation_split"),
    **_of(Policy.REFUSED, "limit_train_batches", "overfit_batches", "optimizer"),
    **_of(Policy.NOW, "num_train_epochs", "max_steps", "max_tokens", "max_time"),
    **_of(Policy.NOW, "per_device_train_batch_size", "per_device_eval_batch_size"),
    **_of(Policy.NOW, "gradient_accumulation_steps", "global_batch_size"),
    **_of(Policy.NOW, "learning_rate", "optimizer_kwargs", "weight_decay", "parameter_groups", "max_grad_norm"),
    **_of(Policy.NOW, "lr_scheduler", "lr_scheduler_kwargs", "warmup", "schedule_steps"),
    **_of(Policy.NOW, "mixed_precision", "compile", "gradient_checkpointing", "fsdp", "parallelism", "ddp"),
    **_of(Policy.NOW, "sync_batchnorm", "tf32", "deterministic", "detect_anomaly", "gc_every", "use_cpu"),
    **_of(Policy.NOW, "log_every", "eval_every", "eval_delay", "eval_on_start", "save_every", "save_in_background"),
    **_of(Policy.NOW, "on_save_error", "on_exception", "on_nonfinite", "max_nonfinite", "loss_spike", "keep_last"),
    **_of(Policy.SILENT, "hang_timeout"),
    **_of(Policy.NOW, "keep_best", "keep_every", "metric_for_best", "greater_is_better", "load_best_at_end"),
    **_of(Policy.NOW, "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "drop_last"),
    **_of(Policy.NOW, "seed_each_sample", "on_bad_sample", "max_bad_samples", "remove_unused_columns"),
    **_of(Policy.NOW, "limit_eval_batches", "label_names", "predict_with_generate", "generation_kwargs"),
}


class Difference(NamedTuple):
    """The old and the new value of an argument, in plain values."""

    old: Any
    new: Any


def changed_arguments(args: TrainingArguments, checkpoint: AnyPath, group: ProcessGroup) -> dict[str, Difference]:
    """Return the arguments that differ from a checkpoint's, by name; none if the checkpoint does not hold them."""
    saved = run_on_main_process(group, "fit", lambda: _saved_values(checkpoint))
    if saved is None:
        _logger.warning("%s has no %s, so changed arguments cannot be detected.", checkpoint, ARGUMENTS_FILE)
        return {}
    now, _ = yaml_json.to_plain(args)
    both = [name for name in now if name in saved and now[name] != saved[name]]
    return {name: Difference(saved[name], now[name]) for name in both}


def warn_of_changes(changed: Mapping[str, Difference], checkpoint: AnyPath) -> None:
    """Log the changed arguments, in one warning.

    Raises:
        ConfigurationError: If an argument changed with which the run cannot be resumed.
    """
    refused = [name for name in changed if POLICIES.get(name) is Policy.REFUSED]
    if refused:
        listed = "; ".join(f"{name}: {_text(changed[name])}" for name in refused)
        raise ConfigurationError(
            f"The run of {checkpoint} cannot be resumed with a changed {' and '.join(refused)} ({listed}): samples "
            "would be repeated or skipped, or the optimizer's state would not fit. Give the old value, or "
            'resume="never" for a new run.'
        )
    lines = [
        f"\n  {name}: {_text(difference)}{_ADDED.get(POLICIES.get(name, Policy.NOW), '')}"
        for name, difference in changed.items()
        if POLICIES.get(name) is not Policy.SILENT
    ]
    if lines:
        _logger.warning("Resuming from %s with changed arguments:%s", checkpoint, "".join(lines))


def visible_changes(changed: Mapping[str, Difference]) -> dict[str, list[Any]]:
    """Return the old and the new value of each changed argument, without those that are never reported."""
    return {name: list(difference) for name, difference in changed.items() if POLICIES.get(name) is not Policy.SILENT}


@contextmanager
def naming_group_arguments(changed: Mapping[str, Difference]) -> Generator[None]:
    """Name the changed arguments that make parameter groups in the error of an optimizer's state that does not fit."""
    try:
        yield
    except StateError as error:
        listed = [
            f"{name} ({_text(changed[name])})" for name in ("weight_decay", "parameter_groups") if name in changed
        ]
        if not listed:
            raise
        raise StateError(
            f"{error} The parameter groups follow from {' and '.join(listed)}, and must be the same in a resumed run: "
            "give the old values. (Without weight decay there is no separate group that is exempt from it.)"
        ) from error


_ADDED = {Policy.KEPT: " (the checkpoint's value counts: the order of the data and the generators are restored)"}


def _text(difference: Difference) -> str:
    return " → ".join(_short(value) for value in difference)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _saved_values(checkpoint: AnyPath) -> dict[str, Any] | None:
    file = checkpoint / ARGUMENTS_FILE
    return yaml_json.read_values(file)[0] if file.is_file() else None
