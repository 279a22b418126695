"""Errors for arguments that do not exist, with what to give instead."""

import dataclasses
import functools
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean, nearest
from trainer_lib.trainer.checks.foreign_names import ATTRIBUTES, CONSTRUCTOR, OF_LAUNCHERS, OF_TRAINER, OTHERWISE
from trainer_lib.trainer.huggingface.argument_conversion import explain, is_foreign, renamed

_NEAR = 0.85


def check_names(cls: type, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise for names that are not arguments of `cls`, each with what to give instead."""
    known = [name for name, is_given in _arguments_of(cls).items() if is_given]
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


def check_assigned(arguments: Any) -> None:
    """Raise for attributes set on arguments that are another library's names, or misspelt: they would do nothing.

    Other attributes are yours.
    """
    kind = type(arguments)
    known = _arguments_of(kind)
    others = {name: value for name, value in vars(arguments).items() if name not in known and not hasattr(kind, name)}
    check_names(
        kind,
        (),
        {
            name: value
            for name, value in others.items()
            if is_foreign(name) or renamed(name) or get_close_matches(name, known, n=1, cutoff=_NEAR)
        },
    )


@functools.lru_cache(maxsize=64)  # each evaluation asks; a notebook defines classes again and again
def _arguments_of(cls: type) -> dict[str, bool]:
    """Return the names of arguments, and whether they are given to the constructor."""
    return {field.name: field.init for field in dataclasses.fields(cls)}


def missing_attribute(cls: type, name: str) -> str:
    """Return the message for an attribute that arguments do not have."""
    message = f"{cls.__name__} has no attribute {name!r}."
    if name in ATTRIBUTES:
        return f"{message} Use {ATTRIBUTES[name]}."
    if is_foreign(name):
        return f"{message} TrainingArguments({name}=…) says what Hugging Face's {name} is here."
    closest = renamed(name)
    known = _arguments_of(cls)
    return message + (f" Did you mean {closest!r}?" if closest else did_you_mean(name, known))


def _unknown(cls: type, name: str, value: Any, known: list[str]) -> str:
    message = f"{cls.__name__} has no argument {name!r} (given: {shown(value)})."
    if name in OF_LAUNCHERS:
        return f"{message} Give it to the launcher, before the script: trainer-lib launch --num_processes N script.py."
    if name in OF_TRAINER:
        return f"{message} Give it to the Trainer: Trainer(model, args, {name}=…)."
    if name in OTHERWISE:
        return f"{message} {OTHERWISE[name]}."
    closest = renamed(name)
    if closest is None and name in CONSTRUCTOR:
        return f"{message} That is {CONSTRUCTOR[name]} here, and no argument of a run."
    hint = f" Did you mean {closest!r}?" if closest else did_you_mean(name, known)
    near = ", ".join(nearest(name, known))
    return message + (hint or f" The nearest names are {near}; help({cls.__name__}) lists all {len(known)}.")
