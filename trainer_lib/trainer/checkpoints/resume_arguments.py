"""The arguments of a resumed run: which of them changed, and whether the old or the new value counts."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError, OtherClassError, StateError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.trainer.arguments import yaml_json
from trainer_lib.trainer.arguments.declaration import OnResume, settings
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.publish.save_pretrained import ARGUMENTS_FILE

_logger = get_logger(__name__)

_SHOWN = 80  # characters of a value in a message


class Difference(NamedTuple):
    """The old and the new value of an argument, in plain values, and which of them counts."""

    old: Any
    new: Any
    on_resume: OnResume


def changed_arguments(args: TrainingArguments, checkpoint: AnyPath, group: ProcessGroup) -> dict[str, Difference]:
    """Return the arguments that differ from a checkpoint's, by name; none if the checkpoint does not hold them."""
    saved = run_on_main_process(group, "fit", lambda: _saved_values(checkpoint))
    if saved is None:
        _logger.warning("%s has no %s, so changed arguments cannot be detected.", checkpoint, ARGUMENTS_FILE)
        return {}
    now, _ = yaml_json.to_plain(args)
    policies = {name: declared.on_resume for name, declared in settings(type(args)).items()}
    return {
        name: Difference(saved[name], now[name], policies.get(name, OnResume.NEW))
        for name in now
        if name in saved and now[name] != saved[name]
    }


def warn_of_changes(changed: Mapping[str, Difference], checkpoint: AnyPath) -> None:
    """Log the changed arguments, in one warning.

    Raises:
        ConfigurationError: If an argument changed with which the run cannot be resumed.
    """
    refused = [name for name, difference in changed.items() if difference.on_resume is OnResume.REFUSED]
    if refused:
        listed = "; ".join(f"{name}: {_text(changed[name])}" for name in refused)
        raise ConfigurationError(
            f"The run of {checkpoint} cannot be resumed with a changed {' and '.join(refused)} ({listed}): samples "
            "would be repeated or skipped, or the optimizer's state would not fit. Give the old value, or "
            'resume="never" for a new run.'
        )
    lines = [
        f"\n  {name}: {_text(difference)}{_ADDED.get(difference.on_resume, '')}"
        for name, difference in changed.items()
        if difference.on_resume is not OnResume.SILENT
    ]
    if lines:
        _logger.warning("Resuming from %s with changed arguments:%s", checkpoint, "".join(lines))


def visible_changes(changed: Mapping[str, Difference]) -> dict[str, list[Any]]:
    """Return the old and the new value of each changed argument, without those that are never reported."""
    return {
        name: [difference.old, difference.new]
        for name, difference in changed.items()
        if difference.on_resume is not OnResume.SILENT
    }


@contextmanager
def naming_arguments(changed: Mapping[str, Difference]) -> Generator[None]:
    """Name the changed arguments that made a schedule or parameter groups, if the state does not fit them."""
    try:
        yield
    except OtherClassError as error:
        if "lr_scheduler" not in changed or not error.part.startswith("scheduler"):
            raise
        raise ConfigurationError(
            f"The run cannot be resumed with a changed lr_scheduler ({_text(changed['lr_scheduler'])}): the schedule "
            f"is now a {error.present}, which cannot load the state of a {error.saved}. Give the old value, or "
            'resume="never" for a new run.'
        ) from error
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


_ADDED = {OnResume.KEPT: " (the checkpoint's value counts: the order of the data and the generators are restored)"}


def _text(difference: Difference) -> str:
    return f"{_short(difference.old)} → {_short(difference.new)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _saved_values(checkpoint: AnyPath) -> dict[str, Any] | None:
    file = checkpoint / ARGUMENTS_FILE
    return yaml_json.read_values(file)[0] if file.is_file() else None
