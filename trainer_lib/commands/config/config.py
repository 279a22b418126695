"""The command `trainer-lib config`: a questionnaire that writes the configuration of launches."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.config.default import default_command_parser
from trainer_lib.commands.config.questionnaire import Question, ask_all
from trainer_lib.commands.config.questions import answers_of, configuration, questions
from trainer_lib.commands.config.update import keep_backup, update_command_parser
from trainer_lib.commands.subcommands import add_option, check_can_write, make_parser, writing
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import (
    ClusterConfig,
    SageMakerConfig,
    find_config_file,
    home_config_file,
    load_config_from_file,
)
from trainer_lib.launchers.settings.setting import YES_OR_NO

_WRITE = "write"


def run(arguments: Sequence[str]) -> int:
    """Ask, or do what `default` or `update` says."""
    args = config_command_parser().parse_args(arguments)
    args.func(args)
    return 0


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = (
        "Answer questions, and write the configuration that `trainer-lib launch` and `accelerate launch` read."
    )
    parser = make_parser("config", description, subparsers)
    add_option(parser, "config_file", help=f"the file to write (default: {home_config_file()})")
    parser.set_defaults(func=config_command)
    commands = parser.add_subparsers(title="without questions", metavar="default | update")
    default_command_parser(commands, parents=[])
    update_command_parser(commands, parents=[])
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask the questions, and write the file that the parsed options name."""
    file = Path(args.config_file).expanduser() if args.config_file else home_config_file()
    check_can_write(file)
    config = get_user_input(file)
    with writing(file):
        backup = keep_backup(file)
        config.write(file)
    print(f"The configuration is in {file}{f' (the one before in {backup})' if backup else ''}.")
    print(f"Start a script with it: trainer-lib launch {f'--config_file {file} ' if args.config_file else ''}SCRIPT")


def get_user_input(file: Path | None = None) -> ClusterConfig | SageMakerConfig:
    """Ask the questions, and return the configuration that the answers make.

    Args:
        file: The file that will hold it; what it holds now are the defaults.
    """
    from trainer_lib.launchers.device_count import count_accelerators, get_current_device_type

    print("An empty line takes the answer in brackets; ? explains a question; back goes back one.")
    accelerators, (device_type, _) = count_accelerators(), get_current_device_type()
    file = home_config_file() if file is None else file
    confirmation = Question(
        name=_WRITE,
        text=f"Write {file}?",
        kind=YES_OR_NO,
        help="No ends without writing anything.",
        default=lambda answers: True,
    )
    answers = ask_all([*questions(accelerators, device_type), confirmation], _earlier_answers(file))
    if not answers.pop(_WRITE):
        print("Nothing was written.")
        sys.exit(0)
    return configuration(answers, device_type)


def _earlier_answers(file: Path) -> dict[str, Any]:
    source = file if file.is_file() else find_config_file()
    if source is None:
        return {}
    try:
        config = load_config_from_file(source)
    except ConfigurationError as error:
        print(f"{error}\nThe defaults are those of this machine.")
        return {}
    print(f"The defaults are those in {source}.")
    return answers_of(config)


def main() -> None:
    """Do what the command line of this program says."""
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
