"""This file is arguments as plain values, and in files: JSON and YAML."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import yaml

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, path_at
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, unknown
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

T = TypeVar("T")

# Arguments that may be objects, which are written down by their fields.
PLUGINS: dict[str, type] = {
    "compile": TorchDynamoPlugin,
    "fsdp": FullyShardedDataParallelPlugin,
    "parallelism": ParallelismConfig,
    "ddp": DistributedDataParallelKwargs,
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# YAML 1.1, which PyYAML reads, takes 5e-5 for a text; YAML 1.2 and people take it for a number.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """Reads plain values only."""


class _Dumper(yaml.SafeDumper):
    """Writes plain values, and texts that look like numbers in quotes."""


for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_plain(arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a dataclass as plain values, and why not for each of those that have no plain form."""
    plain: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for field in dataclasses.fields(arguments):
        if not field.init:
            continue
        try:
            plain[field.name] = _plain(getattr(arguments, field.name), field.name)
        except ConfigurationError as error:
            left_out[field.name] = str(error)
    return plain, left_out


def from_plain(values: Any) -> dict[str, Any]:
    """Return what a dataclass is made from: plain values, and objects made from their fields."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(f"Arguments must be a mapping of values by name, got a {type(values).__name__}.")
    made: dict[str, Any] = dict(values)
    for name, kind in PLUGINS.items():
        if isinstance(made.get(name), Mapping):
            made[name] = _make(kind, made[name], name)
    groups = made.get("parameter_groups")
    if isinstance(groups, list):
        made["parameter_groups"] = [
            _make(ParameterGroup, group, f"parameter_groups[{index}]") if isinstance(group, Mapping) else group
            for index, group in enumerate(groups)
        ]
    return made


def write(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write plain values into a file."""
    file = Path(path).expanduser()
    text = (
        json.dumps(values, indent=2, allow_nan=False) + "\n"
        if _is_json(file)
        else yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def read(path: str | os.PathLike[str] | RemotePath, make: Callable[[dict[str, Any]], T]) -> T:
    """Return what `make` makes of the values in a file; errors name the file and the line."""
    values, lines = read_values(path)
    try:
        return make(values)
    except TrainerLibError as error:
        raise type(error)(f"{_place(path, lines, str(error))}: {error}") from error


def read_values(path: str | os.PathLike[str] | RemotePath) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values in a file, and on which line each stands."""
    file = path_at(path)
    is_json = _is_json(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no text: {error}.") from error
    values, lines = _read_json(text, path) if is_json else _read_yaml(text, path)
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold arguments by name, and holds a {type(values).__name__}.")
    return values, lines


def _is_json(file: AnyPath) -> bool:
    if file.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise ConfigurationError(f"{file}: {unknown('ending', file.suffix, ['.json', '.yaml', '.yml'])}")
    return file.suffix.lower() == ".json"


def _read_json(text: str, path: Any) -> tuple[Any, dict[str, int]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(f"{path}: {twice[0]} is given twice.")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: no JSON: {error.msg}.") from error
    names = re.finditer(r'"(\w+)"\s*:', text)
    return values, {match[1]: text.count("\n", 0, match.start()) + 1 for match in reversed(list(names))}


def _read_yaml(text: str, path: Any) -> tuple[Any, dict[str, int]]:
    loader = _Loader(text)
    lines: dict[str, int] = {}
    try:
        node = loader.get_single_node()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigurationError(f"{path}, line {line}: {key.value} is given twice.")
            lines[str(key.value)] = line
        values = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigurationError(f"{path}{where}: no plain YAML: {getattr(error, 'problem', error)}.") from error
    finally:
        loader.dispose()
    return values, lines


def _place(path: Any, lines: Mapping[str, int], message: str) -> str:
    """Return the file, with the line of the argument that a message is about."""
    told = [word for word in re.findall(r"\w+", message) if word in lines]
    return f"{path}, line {lines[told[0]]}" if told else str(path)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{path}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, f"{path}.{key}") for key, one in value.items()}
    if isinstance(value, torch.dtype) and value in _DTYPES:
        return _DTYPES[value]
    if isinstance(value, (*PLUGINS.values(), ParameterGroup)) or type(value).__name__ == "MixedPrecisionPolicy":
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(cast("Any", value))}
        return {name: _plain(one, f"{path}.{name}") for name, one in fields.items() if one is not None}
    raise ConfigurationError(
        f"{path} is {shown(value)}, which cannot be written down: files hold numbers, texts, lists and mappings."
    )


def _make(kind: type, fields: Mapping[str, Any], path: str) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise ConfigurationError(unknown(f"field of {path}", name, known))
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigurationError(f"{path} does not make a {kind.__name__}: {error}.") from error
