"""The command `trainer-lib completion`: commands and options of the launcher, completed by bash."""

import argparse
from collections.abc import Iterable, Sequence

from trainer_lib.commands.subcommands import make_parser

_SCRIPT = """\
_trainer_lib() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options="--help"
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
        launch|test) options="--help {launch}" ;;
        train) options="--help --config {train}" ;;
        check) options="--help --json {launch}" ;;
        evaluate) options="--help --watch {launch}" ;;
        config) options="--help --config_file default update" ;;
        env) options="--help --config_file --json" ;;
    esac
    if [[ $word == -* || ${{COMP_WORDS[1]}} == config ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    fi
}}
complete -o default -F _trainer_lib trainer-lib
"""


def run(arguments: Sequence[str]) -> int:
    """Print the script."""
    from trainer_lib.commands.main import COMMANDS

    completion_parser().parse_args(arguments)
    print(script(COMMANDS), end="")
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    return make_parser("completion", 'Print completions for bash. Put into ~/.bashrc: eval "$(trainer-lib completion)"')


def script(commands: Iterable[str]) -> str:
    """Return the script for bash.

    Args:
        commands: The names of the commands.
    """
    from trainer_lib.commands.train.train_help import declared
    from trainer_lib.launchers.settings.launch_options import SETTINGS

    options = " ".join(f"--{setting.name}" for setting in SETTINGS.values() if setting.missing is None)
    train = " ".join(f"--{argument.name}" for argument in declared())
    return _SCRIPT.format(commands=" ".join(commands), launch=options, train=train)
