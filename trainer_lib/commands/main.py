"""The program `trainer-lib`: runs a command and prints errors in one line."""

import importlib
import io
import os
import sys
from collections.abc import Sequence

# The module of each command, whose `run(arguments)` runs it; imported only when needed.
COMMANDS = {
    "launch": ("trainer_lib.commands.launch.launch", "start a script on one or several processes"),
    "submit": ("trainer_lib.commands.submit.submit", "submit a launch to SLURM or Kubeflow"),
    "config": ("trainer_lib.commands.config.config", "answer questions, and write the configuration of launches"),
    "env": ("trainer_lib.commands.env", "print versions, devices, packages, configuration and variables"),
    "test": ("trainer_lib.commands.test", "check the world that `launch` starts: collectives, data order, training"),
    "check": ("trainer_lib.commands.check", "check a script on its own model and data before it trains"),
    "evaluate": ("trainer_lib.commands.evaluate", "evaluate the checkpoints of a run, even while it trains"),
    "train": ("trainer_lib.commands.train.train", "train a model of a common task on a data file, without a script"),
    "estimate-memory": ("trainer_lib.commands.estimate", "estimate the memory that a model takes"),
    "plan": ("trainer_lib.commands.plan.plan", "simulate a mesh: memory and messages of each rank, without devices"),
    "merge-weights": ("trainer_lib.commands.merge", "merge a sharded FSDP checkpoint into one of whole weights"),
    "to-fsdp2": ("trainer_lib.commands.to_fsdp2", "convert a configuration of FSDP1 to FSDP2"),
    "tpu-config": ("trainer_lib.commands.tpu", "run commands on all machines of a TPU pod"),
    "runs": ("trainer_lib.commands.runs.runs", "list runs: status, progress and metrics"),
    "report": ("trainer_lib.commands.runs.report", "write an HTML report of a run, or compare several"),
    "checkpoint": ("trainer_lib.commands.checkpoint.checkpoint", "list, verify, inspect and prune checkpoints"),
    "completion": ("trainer_lib.commands.completion", "print completions for bash"),
    "track": ("trainer_lib.commands.runs.track", "resend values that trackers did not accept"),
}

_WRONG_USE = 2
_INTERRUPTED = 130
_OUTPUT_CLOSED = 141  # as for a program that SIGPIPE ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for a wrong option, or that of a failed script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: an encoding may lack a character of a text
    try:  # all imports are inside, so that Ctrl-C during one of them has no traceback
        return _code(name, arguments[1:])
    except KeyboardInterrupt:
        print(f"trainer-lib {name}: interrupted.", file=sys.stderr)
        return _INTERRUPTED


def main_of_program() -> int:
    """Run the command that this program is named after, and return its exit code: `trainer-lib-launch` is `launch`."""
    from pathlib import Path

    return main([Path(sys.argv[0]).stem.removeprefix("trainer-lib-"), *sys.argv[1:]])


def _code(name: str, arguments: Sequence[str]) -> int:
    from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, UnsupportedError

    try:
        code = _run(name, arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except TrainerLibError as error:
        print(f"trainer-lib {name}: error: {error}", file=sys.stderr)
        return _WRONG_USE if isinstance(error, (ConfigurationError, UnsupportedError)) else 1
    except OSError:
        if sys.stdout is None or (failure := _output_failure()) is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        if isinstance(failure, BrokenPipeError):  # nobody reads it any more, as after `| head -1`
            return _OUTPUT_CLOSED
        print(f"trainer-lib {name}: error: the output could not be written: {failure.strerror}.", file=sys.stderr)
        return 1


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("", "-h", "--help"):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else _WRONG_USE
    if name == "--version":
        from trainer_lib import __version__

        print(f"trainer-lib {__version__}")
        return 0
    if name not in COMMANDS:
        from trainer_lib.foundation.errors import ConfigurationError, unknown

        raise ConfigurationError(unknown("command", name, COMMANDS))
    try:
        return importlib.import_module(COMMANDS[name][0]).run(arguments)
    except SystemExit as end:  # argparse has printed its help
        return int(end.code or 0)


def _output_failure() -> OSError | None:
    """Return why standard output does not take a line; `None` if it does."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None


def _usage() -> str:
    commands = "\n".join(f"  {name:17}{what}" for name, (_, what) in COMMANDS.items())
    return f"usage: trainer-lib COMMAND …\n\n{commands}\n\n`trainer-lib COMMAND -h` tells more."


if __name__ == "__main__":
    sys.exit(main())
