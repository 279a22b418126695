"""Arguments as plain values, and as JSON and YAML files."""

import dataclasses
import functools
import json
import math
import os
import re
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, path_at
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, unknown
from trainer_lib.trainer.arguments.type_hints import field_types, has_fields, members

T = TypeVar("T")

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def to_plain(arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a dataclass as plain values, and the reason for each field that has no plain form."""
    plain: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for field in dataclasses.fields(arguments):
        if not field.init:
            continue
        try:
            plain[field.name] = _plain(getattr(arguments, field.name), field.name, type(arguments))
        except ConfigurationError as error:
            left_out[field.name] = str(error)
    return plain, left_out


def from_plain(cls: type, values: Any) -> dict[str, Any]:
    """Return the values for a dataclass, with objects built from their fields."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(f"Arguments must be a mapping from names to values, got a {type(values).__name__}.")
    arguments: dict[str, Any] = dict(values)
    for name, kind in _object_types(cls).items():
        value = arguments.get(name)
        if isinstance(value, Mapping):
            arguments[name] = _make(kind, value, name)
        elif isinstance(value, list):
            arguments[name] = [
                _make(kind, item, f"{name}[{index}]") if isinstance(item, Mapping) else item
                for index, item in enumerate(value)
            ]
    return arguments


def write(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write plain values to a file."""
    file = Path(path).expanduser()
    text = json.dumps(values, indent=2, allow_nan=False) + "\n" if _is_json(file) else _yaml_text().dump(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def read(path: str | os.PathLike[str] | RemotePath, make: Callable[[dict[str, Any]], T]) -> T:
    """Return `make(values)` for the values in a file; errors name the file and the line."""
    values, lines = read_values(path)
    try:
        return make(values)
    except TrainerLibError as error:
        raise type(error)(f"{_location(path, lines, str(error))}: {error}") from error


def read_values(path: str | os.PathLike[str] | RemotePath) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values in a file, and the line of each."""
    file = path_at(path)
    is_json = _is_json(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not a text file in UTF-8: {error}.") from error
    values, lines = _read_json(text, path) if is_json else _yaml_text().read(text, path)
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{path} must hold a mapping from argument names to values, and holds a {type(values).__name__}."
        )
    return values, lines


def _yaml_text() -> ModuleType:
    from trainer_lib.trainer.arguments import yaml_text  # not before it is needed: it takes 15 ms to import

    return yaml_text


def _is_json(file: AnyPath) -> bool:
    if file.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise ConfigurationError(f"{file}: {unknown('file extension', file.suffix, ['.json', '.yaml', '.yml'])}")
    return file.suffix.lower() == ".json"


def _read_json(text: str, path: Any) -> tuple[Any, dict[str, int]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(f"{path}: {repeated[0]} is given twice. Give it once.")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: invalid JSON: {error.msg}.") from error
    names = re.finditer(r'"(\w+)"\s*:', text)
    return values, {match[1]: text.count("\n", 0, match.start()) + 1 for match in reversed(list(names))}


def _location(path: Any, lines: Mapping[str, int], message: str) -> str:
    """Return the file, with the line of the argument that an error message names."""
    names = [word for word in re.findall(r"\w+", message) if word in lines]
    return f"{path}, line {lines[names[0]]}" if names else str(path)


@functools.lru_cache(maxsize=64)
def _object_types(cls: type) -> dict[str, type]:
    """Return the class of each argument that may be an object or a list of objects, by the argument's name."""
    hints = field_types(cls)
    types = {
        name: [kind for member in members(hint) for kind in (member, *typing.get_args(member))]
        for name, hint in hints.items()
    }
    return {name: kind for name, kinds in types.items() for kind in kinds if has_fields(kind)}


def _plain(value: Any, path: str, cls: type) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path, cls)
    if isinstance(value, str):
        return str(value)  # files hold no subclasses of it
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]", cls) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{path}.{key}", cls) for key, item in value.items()}
    if isinstance(value, torch.dtype) and value in _DTYPES:
        return _DTYPES[value]
    if isinstance(value, tuple(_object_types(cls).values())) or type(value).__name__ == "MixedPrecisionPolicy":
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(cast("Any", value))}
        kind = type(value)
        return {name: _plain(item, f"{path}.{name}", kind) for name, item in fields.items() if item is not None}
    raise ConfigurationError(
        f"{path} is {shown(value)}, which cannot be saved: files hold numbers, texts, lists and mappings."
    )


def _make(kind: type, fields: Mapping[str, Any], path: str) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise ConfigurationError(unknown(f"field of {path}", name, known))
    try:
        return kind(**from_plain(kind, fields))
    except TypeError as error:
        raise ConfigurationError(f"{path} is not a valid {kind.__name__}: {error}.") from error
