"""The command `trainer-lib runs`: lists the runs in a folder, with status, progress and metrics."""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_lib.commands.subcommands import Parser, writing
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from trainer_lib.runs.run_summary import RunSummary

_CLEAR = "\x1b[H\x1b[2J"
_PAUSE = 2.0  # seconds between two refreshes
_EPILOG = """\
DIR is a folder of runs (an output_dir, or one that has some), or that of one run (default: the folder one is in); or
the URL of one, such as s3://bucket/runs.
"""


def run(arguments: Sequence[str]) -> int:
    """List runs and return the exit code."""
    options = _parser().parse_args(list(arguments))
    if not options.folder.is_dir():
        raise ConfigurationError(f"{options.folder} is no folder. Give one that has runs in it, such as an output_dir.")
    if options.live:
        return _serve(options)
    if options.port is not None or options.open:
        raise ConfigurationError(
            "--port and --open belong to the page that --live serves. Add --live, or leave them out."
        )
    if options.html is not None:
        from trainer_lib.runs.report.runs_page import write_runs_page

        with writing(options.html):
            write_runs_page(options.folder, options.html)
        print(options.html)
        return 0
    if options.watch:
        return _watch(options)
    print(_listing(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trainer-lib runs",
        description="List runs with their status, progress and metrics.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", default=".", metavar="DIR", type=_path)
    parser.add_argument("--watch", action="store_true", help="look again every two seconds, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with search and links to the reports")
    parser.add_argument("--live", action="store_true", help="serve that page on this machine, with live reports")
    parser.add_argument("--open", action="store_true", help="with --live: open it in a browser")
    parser.add_argument("--port", type=int, metavar="N", help="the port of --live (default: a free one)")
    return parser


def _path(text: str) -> AnyPath:
    return path_at(text).expanduser()


def _serve(options: argparse.Namespace) -> int:
    from trainer_lib.commands.runs.serve import serve
    from trainer_lib.runs.report.live_report import LiveRuns

    if options.watch or options.json or options.html:
        raise ConfigurationError("--live serves a page. Leave out --watch, --json and --html.")
    if not isinstance(options.folder, Path):
        raise UnsupportedError("--live reads files as they grow, and behind a URL none do. Leave it out.")
    return serve(LiveRuns(options.folder, options.port or 0), options.open)


def _watch(options: argparse.Namespace) -> int:
    if options.json or not sys.stdout.isatty():
        raise ConfigurationError("--watch needs a terminal to draw in. Leave it out, and --json with it.")
    try:
        while True:
            print(f"{_CLEAR}{_listing(options)}", flush=True)
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return 0


def _listing(options: argparse.Namespace) -> str:
    from trainer_lib.runs.report.sparkline import shows_sparklines
    from trainer_lib.runs.run_summary import list_runs

    runs = list_runs(options.folder)
    if options.json:
        return json.dumps([dataclasses.asdict(run) | {"path": str(run.path)} for run in map(_finite, runs)], indent=1)
    if not runs:
        return f"There are no runs in {options.folder.absolute()}."
    rows = [_row(run, options.folder, shows_sparklines(sys.stdout)) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name, text in row.items() if text))
    return "\n".join(_lines([names, *([row[name] for name in names] for row in rows)]))


def _row(run: "RunSummary", folder: AnyPath, with_sparkline: bool) -> dict[str, str]:
    from trainer_lib.runs.report.formatting import duration, short
    from trainer_lib.runs.report.sparkline import sparkline
    from trainer_lib.runs.run_summary import name_of

    total = "" if run.max_steps is None else f"/{run.max_steps}"
    best = "" if run.best is None else f"{run.best['metric']} {short(run.best['value'])} at {run.best['step']}"
    age = "" if run.saved is None else f", {duration(max(time.time() - run.saved, 0.0))} ago"
    return {
        "run": name_of(run.path, folder),
        "state": run.status,
        "step": "" if run.step is None else f"{run.step}{total}",
        "loss": f"{run.losses[-1]:.4g}" if run.losses else "",
        "": sparkline(run.losses, 16) if with_sparkline else "",
        "best": best,
        "time": "" if run.seconds is None else duration(run.seconds),
        "last checkpoint": "" if run.checkpoint is None else f"{Path(run.checkpoint).name}{age}",
    }


def _lines(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    if sys.stdout.isatty():  # what does not fit is left out, the last columns first
        room = shutil.get_terminal_size().columns
        while len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > room:
            widths.pop()
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in table]


def _finite(run: "RunSummary") -> "RunSummary":
    """Return a run without NaN and Inf, which JSON does not have."""
    return dataclasses.replace(run, losses=[loss for loss in run.losses if loss - loss == 0])
