"""The command `trainer-lib track`: sends what trackers did not accept during a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_lib.commands.subcommands import Parser
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.tracking.delivery.replay import SpooledRun, find, send


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 if something could not be sent."""
    parser = Parser(prog="trainer-lib track", description="Resend values that trackers did not accept.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    replay = actions.add_parser("replay", help="resend values that trackers did not accept")
    replay.add_argument("place", metavar="RUN", help="the folder of a run, its spool, or a file in it")
    replay.add_argument("--tracker", metavar="NAME", help="only the entries of this tracker")
    replay.add_argument("--dry-run", action="store_true", help="list the entries, and send nothing")
    options = parser.parse_args(arguments)
    waiting = [
        spool
        for spool in find(Path(options.place).expanduser())
        if options.tracker is None or spool.tracker == options.tracker
    ]
    if not waiting:
        print("Nothing waits.")
        return 0
    return max([_list(spool) if options.dry_run else _send(spool) for spool in waiting])


def _list(waiting: SpooledRun) -> int:
    print(f"{waiting.tracker}: {len(waiting.lines)} entries wait in {waiting.path}.")
    return 0


def _send(waiting: SpooledRun) -> int:
    try:
        count = send(waiting)
    except TrainerLibError:
        raise
    except Exception as error:  # noqa: BLE001  # a tracker may raise anything
        text = " ".join(str(error).split())
        print(
            f"{waiting.tracker}: not sent ({type(error).__name__}: {text[:500]}). {waiting.path} stays.",
            file=sys.stderr,
        )
        return 1
    print(f"{waiting.tracker}: {count} entries are sent, to the project {waiting.project}.")
    return 0
