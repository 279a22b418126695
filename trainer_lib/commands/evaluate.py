"""The command `trainer-lib evaluate`: evaluate the checkpoints of a run in a program of its own."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch.launch import launch_command
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.subcommands import make_parser
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.setting import SWITCH, Setting
from trainer_lib.runs.run_status import is_run

_WATCH = Setting(name="watch", group="evaluate", kind=SWITCH, help="wait for further checkpoints", key=None)


def run(arguments: Sequence[str]) -> int:
    """Launch the script, whose first `fit` evaluates the checkpoints of a run instead of training."""
    if not arguments or arguments[0] in ("-h", "--help"):
        evaluate_command_parser().parse_args(["--help"])
    folder, (options, command) = _run_at(arguments[0]), parse(arguments[1:], {_WATCH.name: _WATCH})
    if not command:
        raise ConfigurationError("No script was given. Name the one that trains: trainer-lib evaluate RUN SCRIPT.")
    options.training_script, *options.training_script_args = command
    with tempfile.TemporaryDirectory(prefix="trainer_lib-evaluate-") as place:
        begun = Path(place, "begun")
        variables = {
            environment.EVALUATED_RUN: str(folder),
            environment.WATCHED_RUN: "1" if options.watch else "0",
            environment.EVALUATION_BEGUN: str(begun),
        }
        with environment.patch_environment(**variables):
            launch_command(options)
        if not begun.exists():
            why = "the script ended without Trainer.fit(), so nothing is evaluated"
            print(f"trainer-lib evaluate: error: {why}.", file=sys.stderr)
            return 1
    return 0


def evaluate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = (
        "Start SCRIPT, and where it first calls Trainer.fit(), evaluate the checkpoints of RUN instead of training, as "
        "an evaluation within the run would: on the script's evaluation sets, with its metrics. RUN may train "
        "meanwhile, on other devices. Each checkpoint is evaluated once; its metrics are printed and added to "
        "RUN/evaluations.jsonl, which reports of the run show."
    )
    epilog = (
        "Takes all options of `trainer-lib launch`. RUN is the folder of a run, or of several runs: then the newest."
    )
    usage = "trainer-lib evaluate RUN [--watch] [options of launch] SCRIPT [options of the script]"
    parser = make_parser("evaluate", description, subparsers, epilog=epilog, usage=usage)
    parser.add_argument(
        "--watch", action="store_true", help="wait for further checkpoints, until the run is finished or Ctrl-C"
    )
    return parser


def _run_at(text: str) -> AnyPath:
    from trainer_lib.runs.find_runs import find_runs

    folder = path_at(text).expanduser().absolute()
    if is_run(folder):
        return folder
    runs = find_runs(folder) if folder.is_dir() else []
    if not runs:
        raise ConfigurationError(
            f"{text} is no run. Give the folder of a run, such as output_dir/RUN_ID, before the options and the script."
        )
    return runs[-1].run.path
