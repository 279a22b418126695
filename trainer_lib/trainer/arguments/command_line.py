"""The command line of `TrainingArguments`, parsed by jsonargparse (the extra `cli`)."""

import dataclasses
import inspect
import re
import sys
import types
import typing
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Union, cast

import yaml

from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError
from trainer_lib.foundation.imports import require
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.type_hints import choices, field_types, has_fields, members
from trainer_lib.trainer.arguments.unknown_names import check_names
from trainer_lib.trainer.arguments.yaml_json import from_plain, read_values
from trainer_lib.trainer.huggingface.argument_conversion import is_foreign

_OTHER = "other arguments"  # the section of fields that a subclass declares without `setting`
_METAVARS: dict[Any, str] = {bool: "true|false", int: "N", float: "NUMBER", list: "[...]", dict: "{...}"}
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)


def parse(cls: type[Any], argv: Sequence[str] | None, defaults: Mapping[str, Any]) -> Any:
    """Return an object of `cls` with the arguments given on the command line; a wrong one ends the program."""
    parser = _parser(cls, defaults)
    try:
        return _parsed(cls, parser, sys.argv[1:] if argv is None else argv, defaults)
    except TrainerLibError as error:
        cast("ArgumentParser", parser).error(str(error))


def read(cls: type[Any], argv: Sequence[str], defaults: Mapping[str, Any]) -> Any:
    """Return an object of `cls` with the arguments given on the command line.

    Raises:
        ConfigurationError: For an argument that is unknown or wrong.
    """
    parser = _parser(cls, defaults)
    parser.error = _raise
    return _parsed(cls, parser, argv, defaults)


def _parsed(cls: type[Any], parser: Any, argv: Sequence[str], defaults: Mapping[str, Any]) -> Any:
    words = _normalize(list(argv), _flags(cls))
    _check_options(cls, words)
    options = parser.parse_args(words, defaults=False).as_dict()
    values, places = dict(defaults), dict[str, str]()
    for file in options.pop("config", None) or []:
        of_file, lines = read_values(file)
        values |= of_file
        places |= {name: f"{file}, line {line}" for name, line in lines.items()}
    try:
        return cls(**from_plain(cls, values | options))
    except TrainerLibError as error:
        named = (name for name in re.findall(r"\w+", str(error)) if name in places and name not in options)
        place = places.get(next(named, ""))
        raise type(error)(f"{place}: {error}" if place else str(error)) from error


def _raise(message: str, error: Exception | None = None) -> NoReturn:
    raise ConfigurationError(message) from error


def _parser(cls: type[Any], defaults: Mapping[str, Any]) -> Any:
    jsonargparse = require("jsonargparse", "cli")
    parser = jsonargparse.ArgumentParser(
        formatter_class=HelpFormatter,
        usage="%(prog)s [--config FILE] [--ARGUMENT VALUE ...]",
        description="Write values as in YAML, None as null. Options override the files of --config.",
        default_env=False,
    )
    parser.add_argument("--config", action="append", metavar="FILE", help="Arguments in a .yaml or .json file.")
    texts = descriptions(cls)
    hints = field_types(cls)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        section = settings(cls)[field.name].section if field.name in settings(cls) else _OTHER
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        default = defaults.get(field.name, field.default)
        kinds = _kinds(hints[field.name])
        shown = "" if default in (None, dataclasses.MISSING, ()) else f" (default: {default})"
        groups[section].add_argument(
            f"--{field.name}",
            type=Union[(*kinds, str)],  # accepts any text: the checks of TrainingArguments raise the errors
            metavar=_metavar(kinds, choices(hints[field.name])),
            help=(texts.get(field.name, "").replace("`", "") + shown).replace("%", "%%"),
        )
    return parser


def descriptions(cls: type) -> dict[str, str]:
    """Return the sentence of each argument; a field without `setting` has it in the docstring of its class."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docstring = inspect.cleandoc(base.__doc__ or "") if dataclasses.is_dataclass(base) else ""
        _, _, arguments = docstring.partition("Args:\n")
        for name, text in _ENTRY.findall(arguments.partition("\nExample:")[0]):
            texts[name] = " ".join(text.split())
    return texts | {name: declared.text for name, declared in settings(cls).items()}


def _check_options(cls: type, words: Sequence[str]) -> None:
    """Raise for options that are not arguments, with what to give instead."""
    options: dict[str, Any] = {}
    for index, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name.partition(".")[0] in ("config", "help", "print_config"):
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        text = value if equals else "true" if following.startswith("--") else following
        options[name.partition(".")[0]] = _parse_value(text) if is_foreign(name) else text
    check_names(cls, (), options)


def _parse_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _normalize(words: list[str], flags: Iterable[str]) -> list[str]:
    """Return options with underscores (`--max-steps` is `--max_steps`), and flags with a value (`--dry_run=true`)."""
    known = set(flags)
    normalized: list[str] = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
            has_no_value = not equals and (index + 1 == len(words) or words[index + 1].startswith("--"))
            word = f"{name}=true" if has_no_value and name[2:] in known else f"{name}{equals}{value}"
        normalized.append(word)
    return normalized


def _flags(cls: type) -> list[str]:
    hints = field_types(cls)
    return [name for name, hint in hints.items() if bool in members(hint)]


def _metavar(kinds: Iterable[Any], choices: Sequence[str]) -> str:
    names = [_METAVARS.get(typing.get_origin(kind) or kind, "TEXT") for kind in kinds if kind is not types.NoneType]
    return "|".join([name for name in names if name != "TEXT"] + list(choices) if choices else names)


def _kinds(hint: Any) -> list[Any]:
    """Return the types that a command line can express: plain values, and objects as dicts of their fields."""
    return list(dict.fromkeys(_kind(member) for member in members(hint)))


def _kind(hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return types.GenericAlias(list, (_kind(typing.get_args(hint)[0]),))
    if hint in (bool, int, float, types.NoneType):
        return hint
    return dict[str, Any] if has_fields(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)) else str
