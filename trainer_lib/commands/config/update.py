"""Rewrite a configuration file with today's keys, as `accelerate config update` does."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from trainer_lib.commands.subcommands import writing
from trainer_lib.launchers.settings.config_file import default_config_file, load_config_from_file


def update_config(args: argparse.Namespace) -> Path:
    """Rewrite the file that the parsed options name, and return it; what was in it is kept beside it."""
    named = getattr(args, "config_file", None)
    file = Path(named).expanduser() if named else default_config_file()
    config = load_config_from_file(file)
    with writing(file):
        keep_backup(file)
        config.write(file)
    return file


def update_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command `update` to subparsers, and return its parser."""
    command = parser.add_parser("update", parents=parents, help="rewrite a configuration with today's keys")
    # Without a default, which would override the option of `config` itself.
    command.add_argument(
        "--config_file", "--config-file", default=argparse.SUPPRESS, help="the file (default: the one that counts)"
    )
    command.set_defaults(func=update_config_command)
    return command


def update_config_command(args: argparse.Namespace) -> None:
    """Rewrite the file, and say where."""
    file = update_config(args)
    print(f"{file} has today's keys. The old one: {backup_of(file)}.")


def backup_of(file: Path) -> Path:
    """Return the name of the copy of a file."""
    return file.with_name(f"{file.name}.bak")


def keep_backup(file: Path) -> Path | None:
    """Copy a file beside itself before it is rewritten, and return the copy, if there is such a file."""
    if not file.is_file():
        return None
    shutil.copy2(file, backup_of(file))
    return backup_of(file)
