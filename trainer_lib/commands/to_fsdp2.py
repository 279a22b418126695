"""Convert FSDP1's options in a configuration file to those of FSDP2, as `accelerate to-fsdp2` does."""

import argparse
import enum
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.commands.subcommands import add_option, make_parser, writing
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import read_file, write_text

_logger = logging.getLogger(__name__)


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
    "1": True,
    "2": False,
    "3": False,
    "4": True,
    "5": False,  # a file of FSDP1 may hold a strategy's number
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
    return read_file(config_file)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = "Convert FSDP1's options in a configuration file to those of FSDP2."
    parser = make_parser("to-fsdp2", description, subparsers)
    add_option(parser, "config_file", required=True, help="the file to convert")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    add_option(parser, "output_file", help="the file to write; with --overwrite, by default the input file")
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Convert a file."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(arguments))
    return 0


def main() -> None:
    """Convert the file that the command line of this program names."""
    sys.exit(run(sys.argv[1:]))


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert the file that the parsed options name."""
    if not args.overwrite and args.output_file is None:
        raise ConfigurationError("There is no file to write to. Give --output_file, or --overwrite.")
    file = Path(args.config_file if args.output_file is None else args.output_file)
    if file.exists() and not args.overwrite:
        raise ConfigurationError(f"The output file {file} exists. Give another --output_file, or --overwrite.")
    config = load_config(args.config_file)
    converted = convert_config_to_fsdp2(config)
    with writing(file):
        write_text(file, yaml.safe_dump(converted))
    if converted is config:
        print(f"{args.config_file} has no options of FSDP1: {file} has the same options.")
    else:
        print(f"The configuration for FSDP2 is in {file}.")


if __name__ == "__main__":
    main()
