"""The command `trainer-lib report`: runs as one page of HTML."""

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from trainer_lib.commands.subcommands import Parser, writing
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

_EPILOG = """\
RUN is the folder of a run (output_dir/RUN_ID) or its URL, a folder of runs, or a history file that JsonlLog wrote.
Several are compared. The page holds everything it needs: it can be sent to others, and opened without a network.
"""


def run(arguments: Sequence[str]) -> int:
    """Write a report, or serve one, and return the exit code."""
    options = _parser().parse_args(list(arguments))
    from trainer_lib.runs.report.report_page import find_runs, write_report

    if options.port is not None and not options.live:
        raise ConfigurationError("--port is where --live serves the report. Add --live, or leave it out.")
    if options.charts is not None and (options.live or options.output is not None):
        raise ConfigurationError("--charts writes pictures instead of a page. Leave out --live and --output.")
    if options.output is not None and options.live:
        raise ConfigurationError("--live serves the report and writes no file. Leave out --output, or --live.")
    if options.live and not all(isinstance(path, Path) for path in options.runs):
        raise UnsupportedError("--live reads on as files grow, and behind a URL none do. Leave it out, and ask again.")
    sources = find_runs(options.runs)
    if options.live:
        from trainer_lib.commands.runs.serve import serve
        from trainer_lib.runs.report.live_report import LiveReport

        return serve(LiveReport(sources, options.port or 0), options.open)
    if options.charts is not None:
        from trainer_lib.runs.report.static_charts import write_charts

        with writing(options.charts):
            files = write_charts(sources, options.charts, options.format)
        for file in files:
            print(file)
        return 0
    file = options.output or _default_file(options.runs, len(sources))
    with writing(file):
        write_report(sources, file)
    print(file)
    if options.open:
        webbrowser.open(file.resolve().as_uri())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trainer-lib report",
        description="Write a report of runs: curves, evaluations, checkpoints, events and arguments.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=lambda text: path_at(text).expanduser())
    output = "where to (default: report.html in the folder of the run; here, if there are several, or a URL)"
    parser.add_argument("--output", metavar="FILE", type=lambda text: Path(text).expanduser(), help=output)
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    parser.add_argument(
        "--live", action="store_true", help="serve it on this machine, and update it while the runs train"
    )
    parser.add_argument(
        "--charts", metavar="DIR", type=Path, help="write each chart into a file of its own, for papers"
    )
    parser.add_argument(
        "--format", choices=["svg", "png", "pdf"], default="svg", help="the format of --charts (default: svg)"
    )
    parser.add_argument("--port", type=int, metavar="N", help="the port of --live (default: a free one)")
    return parser


def _default_file(given: Sequence[AnyPath], count: int) -> Path:
    from trainer_lib.runs.report.report_page import REPORT_FILE
    from trainer_lib.runs.run_status import run_folders

    only = given[0]
    if count > 1 or not isinstance(only, Path):
        return Path(REPORT_FILE)
    if only.is_file():
        return only.with_suffix(".html")
    return Path(*run_folders(only), REPORT_FILE)
