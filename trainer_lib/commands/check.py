"""The command `trainer-lib check`: check a script on its real model and data, before it trains."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch import launch
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.subcommands import make_parser
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError

_JSON = "--json"


def run(arguments: Sequence[str]) -> int:
    """Launch the script, whose first `fit` checks instead of training; print the report and return 0 if all is well."""
    if arguments and arguments[0] in ("-h", "--help"):
        check_command_parser().parse_args(arguments)
    words, as_json = _without_json(list(arguments))
    if not parse(words)[1]:
        raise ConfigurationError("No script was given. Name it after the options: trainer-lib check [options] SCRIPT.")
    with tempfile.TemporaryDirectory(prefix="trainer_lib-check-") as folder:
        file = Path(folder, "report.json")
        with environment.patch_environment(**{environment.CHECK_REPORT: str(file)}), _output_to_stderr(as_json):
            code = launch.run(words)
        if not file.is_file():
            why = "ended without Trainer.fit()" if code == 0 else f"failed with exit code {code} before its check ended"
            print(f"trainer-lib check: error: the script {why}, so there is no report.", file=sys.stderr)
            return code or 1
        report = json.loads(file.read_text())
    text = report.pop("text")
    print(json.dumps(report, indent=1) if as_json else text)
    return 0 if report["passed"] else 1


def check_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = (
        "Start SCRIPT, and where it first calls Trainer.fit(), check instead of training: two updates, two "
        "evaluations, a save, a load, and a resumed update compared with the uninterrupted one, on the script's model "
        "and data. Prints what was proved, and the time, memory, learning rate and files of the whole run. Nothing is "
        "left in the output folder."
    )
    epilog = "Takes all options of `trainer-lib launch`. Exit codes: 0 passed, 1 a check failed, 2 wrong usage."
    usage = "trainer-lib check [--json] [options of launch] SCRIPT [options of the script]"
    parser = make_parser("check", description, subparsers, epilog=epilog, usage=usage)
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, and the script's output to stderr"
    )
    return parser


def _without_json(words: list[str]) -> tuple[list[str], bool]:
    """Return the words without the command's own option, if it stands before the script."""
    if _JSON not in words:
        return words, False
    place = words.index(_JSON)
    rest = words[:place] + words[place + 1 :]
    is_ours = place <= len(rest) - len(parse(rest)[1])
    return (rest, True) if is_ours else (words, False)


@contextlib.contextmanager
def _output_to_stderr(is_wanted: bool) -> Generator[None]:
    """Send what this process and those it starts print to stderr, so that stdout holds JSON alone."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
