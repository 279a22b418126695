"""Errors for arguments that do not exist, with what to give instead."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean, nearest
from trainer_lib.trainer.checks.foreign_names import OF_LAUNCHERS
from trainer_lib.trainer.huggingface.argument_conversion import explain, is_foreign, renamed


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


def _unknown(cls: type, name: str, value: Any, known: list[str]) -> str:
    message = f"{cls.__name__} has no argument {name!r} (given: {shown(value)})."
    if name in OF_LAUNCHERS:
        return f"{message} Give it to the launcher, before the script: trainer-lib launch --num_processes N script.py."
    closest = renamed(name)
    hint = f" Did you mean {closest!r}?" if closest else did_you_mean(name, known)
    near = ", ".join(nearest(name, known))
    return message + (hint or f" The nearest names are {near}; help({cls.__name__}) lists all {len(known)}.")
