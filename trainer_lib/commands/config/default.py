"""A basic configuration for this machine, without questions, as `accelerate config default` writes it."""

import argparse
from pathlib import Path
from typing import Any

from trainer_lib.commands.subcommands import writing
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import default_config_file, load_config_from_file
from trainer_lib.launchers.settings.config_file import write_basic_config as write_basic_config


def default_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command `default` to subparsers, and return its parser."""
    command = parser.add_parser("default", parents=parents, help="write a basic configuration for this machine")
    command.add_argument("--config_file", "--config-file", dest="save_location", help="the file to write")
    command.add_argument(
        "--mixed_precision", "--mixed-precision", choices=["no", "fp16", "bf16"], help="the precision (default: no)"
    )
    command.set_defaults(func=default_config_command)
    return command


def default_config_command(args: argparse.Namespace) -> None:
    """Write the configuration that the parsed options ask for."""
    named = args.save_location or getattr(args, "config_file", None)  # after the command, or before it
    place = default_config_file() if named is None else Path(named).expanduser()
    if not place.exists():
        with writing(place):
            write_basic_config(args.mixed_precision or "no", place)
        print(f"The configuration is in {place}.")
        return
    stays = f"There is a configuration in {place} already, which stays as it is"
    precision = load_config_from_file(place).mixed_precision
    if args.mixed_precision not in (None, precision):
        raise ConfigurationError(
            f"{stays}, with the precision {precision!r} instead of {args.mixed_precision!r}. Delete it, change it with "
            "`trainer-lib config`, or give --config_file another name."
        )
    print(f"{stays}.")
