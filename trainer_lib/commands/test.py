"""The command `trainer-lib test`: check the world that a launch with the configuration starts."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trainer_lib.commands.launch import launch
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.subcommands import add_option, make_parser

_SELF_CHECK = "trainer_lib.testing.self_check"


def run(arguments: Sequence[str]) -> int:
    """Launch the checks, and return their exit code: 0 if all passed."""
    if arguments and arguments[0] in ("-h", "--help"):
        test_command_parser().parse_args(arguments)
    _, script = parse(arguments)
    if script:
        test_command_parser().error(f"unexpected argument {script[0]!r}: the checks are the script")
    return launch.run([*arguments, "-m", _SELF_CHECK])


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028 - no test
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = (
        "Start the world that the configuration describes, and check in it: collectives, the order of data, gradient "
        "accumulation, a training compared with one process, saving and loading, evaluation."
    )
    epilog = "Takes all options of `trainer-lib launch`; they override the configuration."
    parser = make_parser("test", description, subparsers, epilog=epilog)
    add_option(parser, "config_file", help="the configuration (default: the one that `launch` uses)")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Launch the checks with the configuration that the parsed options name.

    Raises:
        SystemExit: If a check fails, with the exit code.
    """
    code = run(["--config_file", args.config_file] if args.config_file else [])
    if code:
        raise SystemExit(code)


def main() -> None:
    """Launch the checks with what the command line of this program says."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
