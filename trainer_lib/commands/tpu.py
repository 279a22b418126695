"""The command `trainer-lib tpu-config`: run commands on all machines of a TPU pod, by gcloud."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.subcommands import add_option, make_parser
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import find_config_file, load_config_from_file

_FOLDER = "/usr/share"  # where Accelerate's commands for pods run


def run(arguments: Sequence[str]) -> int:
    """Run the commands, and return the exit code of gcloud."""
    return _run(tpu_command_parser().parse_args(arguments))


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = "Run commands on all machines of a TPU pod, before a launch there."
    parser = make_parser("tpu-config", description, subparsers)
    add_option(parser, "config_file", help="a configuration with tpu_name, tpu_zone, and commands or a command_file")
    add_option(parser, "tpu_name", help="the name of the TPU")
    add_option(parser, "tpu_zone", help="its zone")
    add_option(parser, "use_alpha", action="store_true", help="use `gcloud alpha`")
    add_option(parser, "command_file", help="a file with a command on each line")
    add_option(parser, "command", action="append", nargs="+", help="a command; may be given several times")
    parser.add_argument(
        "--install_trainer_lib", "--install_accelerate", action="store_true", help="install trainer_lib there first"
    )
    parser.add_argument(
        "--trainer_lib_version", "--accelerate_version", default="latest", help="the version to install, or latest"
    )
    add_option(parser, "debug", action="store_true", help="print what would run, and run nothing")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run what the parsed options say.

    Raises:
        ConfigurationError: If the name, the zone or the commands are missing, or gcloud is not installed.
        SystemExit: If gcloud fails, with its exit code.
    """
    code = _run(args)
    if code:
        raise SystemExit(code)


def _run(args: argparse.Namespace) -> int:
    command = _gcloud(args)
    if args.debug:
        print(f"Would run: {shlex.join(command)}")
        return 0
    if shutil.which("gcloud") is None:
        raise ConfigurationError("There is no program gcloud here. Install it, or print the command by --debug.")
    return subprocess.run(command, check=False).returncode


def _gcloud(args: argparse.Namespace) -> list[str]:
    values = _values(args)
    # Words of one command, or several commands in quotes.
    given = [words if " " in words[0] else [" ".join(words)] for words in args.command or []]
    commands = [command for group in given for command in group]
    if not commands and values.get("command_file"):
        commands = _lines(values["command_file"])
    commands = commands or list(values.get("commands") or [])
    if args.install_trainer_lib:
        commands.insert(0, f"pip install -U trainer_lib{_requirement(args.trainer_lib_version)}")
    if not commands:
        raise ConfigurationError("There is no command to run. Give --command or --command_file.")
    for name in ("tpu_name", "tpu_zone"):
        if not values.get(name):
            raise ConfigurationError(f"--{name} is missing, and no configuration file says it.")
    return [
        "gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", values["tpu_name"],
        "--zone", values["tpu_zone"], "--command", "; ".join([f"cd {_FOLDER}", *commands]), "--worker", "all",
    ]  # fmt: skip


def _requirement(version: str) -> str:
    if version == "latest":
        return ""
    if re.fullmatch(r"[0-9][0-9a-zA-Z.+!]*", version) is None:
        raise ConfigurationError(
            f"--trainer_lib_version must be a version such as 1.0.0, or latest (got {version!r}). To install from a "
            "repository, give --command 'pip install git+URL' first."
        )
    return f"=={version}"


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Return what options say, else the configuration file that was named or is where configurations are."""
    file = args.config_file or find_config_file()
    values = {} if file is None else load_config_from_file(file).to_dict()
    given = {name: getattr(args, name) for name in ("tpu_name", "tpu_zone", "command_file")}
    return values | {name: value for name, value in given.items() if value is not None}


def _lines(file: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"The command file {file} cannot be read: {error.strerror}.") from error
    return [line for line in lines if line.strip()]


def main() -> None:
    """Run what the command line of this program says."""
    sys.exit(run(sys.argv[1:]))
