"""Hugging Face's training arguments: errors that name the equivalent here, and the conversion."""

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.checks.foreign_names import ALWAYS, NONE_HERE, RENAMED
from trainer_lib.trainer.huggingface.argument_forms import OTHER_FORM, Conversion, Made

_CONVERSIONS: dict[str, tuple[tuple[str, ...], Conversion]] = {
    name: (names, conversion) for names, conversion in OTHER_FORM.items() for name in names
}
_SCRIPT_FLAGS = ("do_train", "do_eval", "do_predict", "local_rank")  # filled in by Hugging Face's Trainer itself
_EMPTY: tuple[Any, ...] = (None, "", "none", {}, [], ())


def is_foreign(name: str) -> bool:
    """Whether a name is a Hugging Face argument that has another form here, or no equivalent."""
    return name in _CONVERSIONS or name in NONE_HERE


def renamed(name: str) -> str | None:
    """Return our name for what other libraries call `name`."""
    return RENAMED.get(name)


def explain(given: Mapping[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """Return a line for each group of Hugging Face arguments that belong together: what to give instead.

    Args:
        given: Arguments by name.
        names: The arguments to explain; by default all.
    """
    wanted = set(given if names is None else names)
    return [_line(group, given, conversion) for group, conversion in _together(given) if wanted & set(group)]


def _line(group: Mapping[str, Any], given: Mapping[str, Any], conversion: Conversion | None) -> str:
    theirs = ", ".join(f"{name}={_shown(value)}" for name, value in group.items())
    if _is_always(group):
        return f"{theirs} of Hugging Face's Trainer is always so here. Leave it out."
    ours = conversion(given) if conversion is not None else NONE_HERE[next(iter(group))]
    if isinstance(ours, str):
        return f"{theirs} of Hugging Face's Trainer has no equivalent here: {ours}. Leave it out."
    if not ours:
        return f"{theirs} of Hugging Face's Trainer is so here by default. Leave it out."
    said = ", ".join(f"{name}={_shown(value)}" for name, value in ours.items())
    return f"{theirs} of Hugging Face's Trainer is given here as {said}."


def convert(given: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return our arguments for Hugging Face's, and for each without an equivalent the reason.

    Args:
        given: Hugging Face's arguments.
        known: Our names.
    """
    ours: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for group, conversion in _together(given):
        name = next(iter(group))
        if conversion is None and name in known:
            ours[name] = group[name]
            continue
        if _is_always(group):
            continue
        result = conversion(given) if conversion is not None else NONE_HERE.get(name, "there is no such argument here")
        if isinstance(result, str):
            lost[", ".join(group)] = result
        else:
            ours |= {name: value.make() if isinstance(value, Made) else value for name, value in result.items()}
    return ours, lost


def differing(foreign: Any) -> dict[str, Any]:
    """Return the arguments of a `transformers.TrainingArguments` that differ from its defaults.

    Of arguments that belong together, all are returned if one of them differs.
    """
    if not any(
        kind.__name__ == "TrainingArguments" and kind.__module__.startswith("transformers.")
        for kind in type(foreign).__mro__
    ):
        raise ConfigurationError(
            f"from_transformers takes a transformers.TrainingArguments, got a {type(foreign).__name__}."
        )
    values = {field.name: _plain(getattr(foreign, field.name)) for field in dataclasses.fields(foreign) if field.init}
    changed = {
        field.name
        for field in dataclasses.fields(foreign)
        if field.init and field.name not in _SCRIPT_FLAGS and not _is_default(field, values[field.name])
    }
    wanted = changed | {other for name in changed if name in _CONVERSIONS for other in _CONVERSIONS[name][0]}
    if any(name.startswith("generation_") for name in changed):
        wanted.add("predict_with_generate")  # without which they have no effect
    return {name: value for name, value in values.items() if name in wanted}


def _is_always(group: Mapping[str, Any]) -> bool:
    return all(name in ALWAYS and ALWAYS[name] == value for name, value in group.items())


def _together(given: Mapping[str, Any]) -> list[tuple[dict[str, Any], Conversion | None]]:
    """Return the given arguments in groups that belong together."""
    groups: dict[tuple[str, ...], tuple[dict[str, Any], Conversion | None]] = {}
    for name, value in given.items():
        names, conversion = _CONVERSIONS.get(name, ((name,), None))
        groups.setdefault(names, ({}, conversion))[0][name] = value
    return list(groups.values())


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    default: Any = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    if field.name == "disable_tqdm":
        default = False  # None becomes what the level of logging says
    if field.name in ("activation_checkpointing", "gradient_checkpointing"):
        value = value or None
    if field.name == "accelerator_config" and value is not None:
        return not isinstance(value, (dict, str)) and value == type(value)()
    return value == _plain(default) or (value in _EMPTY and _plain(default) in _EMPTY)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)
