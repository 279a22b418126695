"""The values in a configuration file, checked, with the line of each wrong one."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers.settings.launch_options import NOT_NEEDED, SETTINGS
from trainer_lib.launchers.settings.setting import (
    COUNT,
    COUNT_OR_ZERO,
    FILLED,
    NUMBER,
    SECONDS,
    TEXT,
    THREE_YES_OR_NO,
    YES_OR_NO,
    Kind,
    choice,
)
from trainer_lib.options.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType

_NUMBERS = (COUNT, COUNT_OR_ZERO, NUMBER, SECONDS)
_NULL = "tag:yaml.org,2002:null"

# The prefixes of the keys in the parts of a file, which may be left out there.
SECTIONS = {
    "deepspeed_config": "deepspeed_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "fsdp_config": "fsdp_",
    "megatron_lm_config": "megatron_lm_",
    "mpirun_config": "mpirun_",
    "parallelism_config": "parallelism_config_",
}
_WORLD = choice(*(kind.value for kind in DistributedType), "TPU")
_ENVIRONMENT = choice(*(place.value for place in ComputeEnvironment))
# Keys that are no options of a launch.
_MORE_KEYS: dict[str, Kind] = {
    "compute_environment": _ENVIRONMENT,
    "distributed_type": _WORLD,
    "tpu_name": TEXT,
    "tpu_zone": TEXT,
    "tpu_use_cluster": YES_OR_NO,
    "command_file": TEXT,
}
_LISTS = ("commands", "tpu_vm", "tpu_env")
_TOP_LEVEL: dict[str, Kind] = {
    **{setting.file_key: setting.kind for setting in SETTINGS.values() if setting.file_key and not setting.section},
    **_MORE_KEYS,
}
# Keys of older files.
_OLD_KEYS: dict[str, Kind] = {"fp16": YES_OR_NO, "dynamo_backend": FILLED}
_SAGEMAKER_TEXTS = (
    "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "gpu_ids", "base_job_name",
    "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file",
)  # fmt: skip
_SAGEMAKER: dict[str, Kind] = {
    **{name: _TOP_LEVEL[name] for name in ("mixed_precision", "use_cpu", "debug", "num_machines")},
    **{name: _TOP_LEVEL[name] for name in ("compute_environment", "enable_cpu_affinity")},
    "distributed_type": choice(*(kind.value for kind in SageMakerDistributedType)),
    **dict.fromkeys(_SAGEMAKER_TEXTS, TEXT),
}


def read_values(text: str, file: str | Path) -> dict[str, Any]:
    """Return the values in a configuration file under today's keys; what is not set, or null, is left out.

    Args:
        text: What is in the file: YAML or JSON.
        file: The name of the file in errors.

    Raises:
        ConfigurationError: If something in it is wrong: all that is, each with its line and how to correct it.
    """
    reader = _Reader(str(file))
    values = reader.read(_parsed(text, str(file)))
    if reader.problems:
        raise ConfigurationError("\n".join(message for _, message in sorted(reader.problems)))
    return _updated(values)


def is_sagemaker(values: Mapping[str, Any]) -> bool:
    """Whether the values of a file are for Amazon SageMaker."""
    return values.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value


def _parsed(text: str, file: str) -> yaml.Node:
    try:
        # JSON is YAML too, except for tabs.
        root = yaml.compose(text.replace("\t", " ") if text.lstrip().startswith("{") else text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        problem = error.problem or error.context or "it cannot be read"
        if "'\\t'" in problem:
            raise ConfigurationError(
                f"{file}, line {line}: there is a tab, and YAML allows only spaces. Replace the tab by spaces."
            ) from error
        raise ConfigurationError(
            f"{file}, line {line}: this is neither JSON nor YAML: {problem}. Write one `key: value` a line, with the "
            "keys of a part indented by two spaces."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is neither JSON nor YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        content = "nothing" if root is None else _kind(root)
        raise ConfigurationError(f"{file} must hold options by name, as `num_processes: 2` (got {content}).")
    return root


class _Reader:
    def __init__(self, file: str) -> None:
        self.problems: list[tuple[int, str]] = []  # with their lines
        self._file = file
        self._lines: dict[int, int] = {}  # of the keys, by the id of the value's node

    def read(self, root: yaml.Node) -> dict[str, Any]:
        """Return the values of the whole file."""
        nodes = dict(self._pairs(root))
        environment = nodes.get("compute_environment")
        if environment is not None and environment.value == ComputeEnvironment.AMAZON_SAGEMAKER.value:
            return self._read_sagemaker(nodes)
        values: dict[str, Any] = {}
        known = {**_TOP_LEVEL, **_OLD_KEYS}
        for key, node in nodes.items():
            if key in SECTIONS:
                values[key] = self._read_section(key, node)
            elif key in _LISTS:
                values[key] = self._texts(key, node)
            elif key == "num_processes" and node.value == "-1":  # Accelerate's form of "not set"
                continue
            elif key in known:
                values[key] = self._value(key, known[key], node)
            elif (section := _section_of(key)) is not None:
                self._problem(
                    node, f"`{key}` belongs to `{section}`: write it below that line, indented by two spaces."
                )
            elif not (key == "ipex_config" and self._is_empty(node)):
                self._unknown(key, node, [*_TOP_LEVEL, *SECTIONS, *_LISTS])
        return {key: value for key, value in values.items() if value is not None}

    def _read_sagemaker(self, nodes: Mapping[str, yaml.Node]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, node in nodes.items():
            if key == "dynamo_config":
                values[key] = self._read_section(key, node)
            elif key == "additional_args":
                values[key] = yaml.SafeLoader("").construct_document(node)
            elif key in _SAGEMAKER:
                values[key] = self._value(key, _SAGEMAKER[key], node)
            else:
                self._unknown(key, node, [*_SAGEMAKER, "dynamo_config", "additional_args"])
        return {key: value for key, value in values.items() if value is not None}

    def _read_section(self, section: str, node: yaml.Node) -> dict[str, Any]:
        if node.tag == _NULL:
            return {}
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, f"`{section}` must hold options by name (got {_kind(node)}). Indent its keys below it.")
            return {}
        prefix = SECTIONS[section]
        known = _names_in(section)
        values: dict[str, Any] = {}
        for key, value in self._pairs(node):
            name = known.get(key) or known.get(prefix + key) or known.get(key.removeprefix(prefix))
            if name is None:
                self._unknown(key, value, list(known), f" of `{section}`")
            elif name in values:
                self._problem(value, f"`{key}` is in `{section}` twice. Leave out one of the two.")
            else:
                values[name] = self._value(key, SETTINGS[name].kind, value)
        return {key: value for key, value in values.items() if value is not None}

    def _pairs(self, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
        """Yield keys and values, each key once."""
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, f"A key must be a name (got {_kind(key_node)}). Write `key: value`.")
            elif key in lines:
                self._problem(
                    key_node, f"`{key}` is here again; line {lines[key]} has it too. Leave out one of the two."
                )
            else:
                lines[key] = self._lines[id(value)] = line
                yield key, value

    def _value(self, key: str, kind: Kind, node: yaml.Node) -> Any:
        if node.tag == _NULL:
            return None
        if isinstance(node, yaml.SequenceNode) and kind in (FILLED, THREE_YES_OR_NO):
            return self._checked(key, kind, ",".join(self._texts(key, node)), node)
        if not isinstance(node, yaml.ScalarNode):
            self._problem(node, f"`{key}` must be {kind.allowed} (got {_kind(node)}).")
            return None
        text = str(node.value)
        value = self._checked(key, kind, text, node)
        if value is not None and kind in _NUMBERS and node.style in ("'", '"'):
            self._problem(node, f"`{key}` must be {kind.allowed} (got the text {text!r}). Write {text} without quotes.")
            return None
        return value

    def _checked(self, key: str, kind: Kind, text: str, node: yaml.Node) -> Any:
        try:
            return kind.check(f"`{key}`", text)
        except (ConfigurationError, UnsupportedError) as error:
            self._problem(node, str(error))
            return None

    def _texts(self, key: str, node: yaml.Node) -> list[str]:
        if node.tag == _NULL:
            return []
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            self._problem(node, f"`{key}` must be a list of texts (got {_kind(node)}).")
            return []
        return [str(item.value) for item in items]

    def _is_empty(self, node: yaml.Node) -> bool:
        """Whether a part of an older file asks for nothing."""
        values = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else [node]
        return all(value.tag == _NULL or str(value.value).lower() == "false" for value in values)

    def _unknown(self, key: str, node: yaml.Node, known: list[str], where: str = "") -> None:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        fix = NOT_NEEDED.get(key.removesuffix("_config")) or (
            f"The nearest one is `{nearest[0]}`: write that, or remove the line."
        )
        self._problem(node, f"`{key}` is not a known key{where}. {fix}")

    def _problem(self, node: yaml.Node, message: str) -> None:
        line = self._lines.get(id(node), node.start_mark.line + 1)
        self.problems.append((line, f"{self._file}, line {line}: {message}"))


def _section_of(key: str) -> str | None:
    """Return the part of a file that has this key; `None` if none has."""
    return next((section for section in SECTIONS if key in _names_in(section)), None)


def _names_in(section: str) -> dict[str, str]:
    """Return the keys that a part of a file may have, the old ones too, and the settings they set."""
    settings = [setting for setting in SETTINGS.values() if setting.section == section]
    return {key: setting.name for setting in settings for key in (setting.name, *setting.old_keys)}


def _updated(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with today's keys in place of old ones, as Accelerate translates them."""
    if values.get("distributed_type") == "TPU":
        values["distributed_type"] = DistributedType.XLA.value
    if values.pop("fp16", False):
        values.setdefault("mixed_precision", "fp16")
    backend = values.pop("dynamo_backend", None)
    if backend is not None and str(backend).lower() != "no":
        values["dynamo_config"] = {"dynamo_backend": backend, **values.get("dynamo_config", {})}
    return values


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "options by name"
