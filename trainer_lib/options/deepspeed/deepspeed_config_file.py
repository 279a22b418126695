"""DeepSpeed's JSON file, with its values read by dotted keys."""

import copy
import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from trainer_lib.foundation.errors import ConfigurationError

AUTO = "auto"


class HfDeepSpeedConfig:
    """The values of a DeepSpeed file.

    Args:
        config_file_or_dict: The path of a JSON file, its values as a dict (which is copied), or another
            `HfDeepSpeedConfig`.

    Example:
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.get_value("zero_optimization.stage"), config.is_zero3()
        (3, True)
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def __eq__(self, other: object) -> bool:
        """Whether both have equal values."""
        return isinstance(other, HfDeepSpeedConfig) and self.config == other.config

    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __repr__(self) -> str:
        """Return the values: equal configs have equal representations, on other ranks too."""
        return f"HfDeepSpeedConfig({self.config!r})"

    @classmethod
    def of_section(cls, section: dict[str, Any]) -> "HfDeepSpeedConfig":
        """Return a config over a section itself, not a copy of it."""
        config = cls({})
        config.config = section
        return config

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted key, or `default`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a dotted key, or `None` if there is none, and the last part of the key."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, key
        return cast(dict[str, Any], node), key

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value at a dotted key; sections that are missing are made."""
        *sections, key = ds_key_long.split(".")
        node = self.config
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the value or section at a dotted key."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ConfigurationError(f"The DeepSpeed config has no {ds_key_long!r} to delete.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a value is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a value is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether optimizer states and gradients are sharded (stage 2)."""
        return self.get_value("zero_optimization.stage") == 2

    def is_zero3(self) -> bool:
        """Whether weights are sharded too (stage 3)."""
        return self.get_value("zero_optimization.stage") == 3

    def is_offload(self) -> bool:
        """Whether optimizer states or weights are kept in CPU memory or on NVMe."""
        kinds = ("offload_optimizer", "offload_param")
        devices = [self.get_value(f"zero_optimization.{kind}.device") for kind in kinds]
        return any(device in ("cpu", "nvme") for device in devices)


def values_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a config that is not a section, with its dotted key."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from values_of(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(source: Any) -> dict[str, Any]:
    if isinstance(source, HfDeepSpeedConfig):
        return copy.deepcopy(source.config)
    if isinstance(source, dict):
        return copy.deepcopy(cast(dict[str, Any], source))
    if isinstance(source, (str, PathLike)):
        return _read_file(Path(cast(str, source)))
    raise ConfigurationError(
        f"hf_ds_config must be the path of a JSON file, a dict or an HfDeepSpeedConfig (got {type(source).__name__})."
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"The DeepSpeed config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigurationError(f"The DeepSpeed config {path} is no valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"The DeepSpeed config {path} must hold a JSON object (got {type(values).__name__}).")
    return cast(dict[str, Any], values)
