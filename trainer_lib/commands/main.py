"""The program `trainer-lib`: runs a command and prints errors in one line."""

import importlib
import sys
from collections.abc import Sequence

from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, UnsupportedError, unknown

# The module of each command, whose `run(arguments)` runs it; imported only when needed.
_COMMANDS = {
    "launch": ("trainer_lib.commands.launch", "start a script on one or several processes"),
    "runs": ("trainer_lib.commands.runs", "list runs: status, progress and metrics"),
    "report": ("trainer_lib.commands.report", "write a page of curves and tables of runs, and compare them"),
    "checkpoint": ("trainer_lib.commands.checkpoint", "list, verify, inspect and prune checkpoints"),
    "track": ("trainer_lib.commands.track", "send what trackers did not accept"),
}

_WRONG_USE = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for a wrong option, or that of a failed script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else _WRONG_USE
    try:
        if name not in _COMMANDS:
            raise ConfigurationError(unknown("command", name, _COMMANDS))
        return importlib.import_module(_COMMANDS[name][0]).run(arguments[1:])
    except TrainerLibError as error:
        print(f"trainer-lib {name}: error: {error}", file=sys.stderr)
        return _WRONG_USE if isinstance(error, (ConfigurationError, UnsupportedError)) else 1
    except SystemExit as end:  # argparse has printed its help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _usage() -> str:
    commands = "\n".join(f"  {name:12}{what}" for name, (_, what) in _COMMANDS.items())
    return f"usage: trainer-lib COMMAND …\n\n{commands}\n\n`trainer-lib COMMAND -h` tells more."


if __name__ == "__main__":
    sys.exit(main())
