"""Convert FSDP1's options in a configuration file to those of FSDP2, as `accelerate to-fsdp2` does."""

import argparse
import enum
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


class ConversionStatus(enum.Enum):
    """Why an option of FSDP1 has none of FSDP2 in its place."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_KEPT = (
    "fsdp_version",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_forward_prefetch",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params",
    "fsdp_state_dict_type",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
    "fsdp_activation_checkpointing",
)
_REMOVED = ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
_RESHARDING = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}

ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{name: name for name in _KEPT},
    **dict.fromkeys(_REMOVED, ConversionStatus.REMOVED),
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": _RESHARDING,
    "fsdp_reshard_after_forward": _RESHARDING,
}


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with its `fsdp_config` for FSDP2; options that FSDP2 does not have are logged.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}})
        {'fsdp_config': {'fsdp_reshard_after_forward': False, 'fsdp_version': 2}}
    """
    options: dict[str, Any] = config.get("fsdp_config") or {}
    if not options or options.get("fsdp_version") == 2:
        return config
    converted: dict[str, Any] = {}
    for name, value in options.items():
        new = ARGUMENT_KEY_MAPPING.get(name, name)
        if isinstance(new, ConversionStatus):
            _logger.warning("%s is left out: FSDP2 has no such option.", name)
        else:
            converted[new] = ARGUMENT_VALUE_MAPPING.get(name, {}).get(value, value)
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def load_config(config_file: str | Path) -> dict[str, Any]:
    """Return the options in a configuration file."""
    config = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ConfigurationError(f"{config_file} must hold options by name (got a {type(config).__name__}).")
    return config


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = "Convert FSDP1's options in a configuration file to those of FSDP2."
    parser = (
        argparse.ArgumentParser("to-fsdp2", description=description)
        if subparsers is None
        else subparsers.add_parser("to-fsdp2", description=description)
    )
    parser.add_argument("--config_file", required=True, help="the file")
    parser.add_argument("--overwrite", action="store_true", help="write the result into the same file")
    parser.add_argument("--output_file", help="where the result is written to")
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert the file that the parsed options name."""
    if not args.overwrite and args.output_file is None:
        raise ConfigurationError("There is no file to write to. Give --output_file, or --overwrite.")
    converted = convert_config_to_fsdp2(load_config(args.config_file))
    Path(args.config_file if args.overwrite else args.output_file).write_text(yaml.safe_dump(converted))
