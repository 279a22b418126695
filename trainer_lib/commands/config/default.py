"""A basic configuration of Accelerate's launcher, as scripts import it from `accelerate.commands.config.default`."""

import argparse
from typing import Any

from trainer_lib.launchers.config_file import write_basic_config as write_basic_config


def default_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command `default` to subparsers, and return its parser."""
    command = parser.add_parser("default", parents=parents, help="write a basic configuration for this machine")
    command.add_argument("--config_file", dest="save_location", help="the file (default: that of Accelerate)")
    command.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="the precision")
    command.set_defaults(func=default_config_command)
    return command


def default_config_command(args: argparse.Namespace) -> None:
    """Write the configuration that the parsed options ask for."""
    file = write_basic_config(args.mixed_precision, args.save_location)
    if file:
        print(f"The configuration is in {file}.")
