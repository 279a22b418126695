"""Live pages: a report, and the list of all runs in a folder, that update while the runs train."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.runs.report.live_pages import Answer, LivePages
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.report.report_page import MAX_RUNS, page
from trainer_lib.runs.report.runs_page import runs_data, runs_page
from trainer_lib.runs.run_summary import list_runs, name_of

_KEPT = 100  # comparisons whose histories are in memory


class LiveReport(LivePages):
    """Serves the report of some runs on this machine only.

    Args:
        sources: The runs.
        port: The port; 0 selects a free one.
    """

    def __init__(self, sources: Sequence[Source], port: int = 0) -> None:
        super().__init__(lambda path: _report(sources, path), port)


class LiveRuns(LivePages):
    """Serves the list of the runs in a folder, and the report of each run or of several, on this machine only.

    Args:
        folder: The folder.
        port: The port; 0 selects a free one.
    """

    def __init__(self, folder: AnyPath, port: int = 0) -> None:
        reports: dict[str, list[Source]] = {}

        def answer(path: str) -> Answer | None:
            group, _, name = path.removeprefix("/").rpartition("/")
            if not group:
                return _answer(f"/{name}", lambda: runs_data(folder, is_live=True), runs_page)
            if group not in reports:
                runs = {name_of(run.path, folder): run.path for run in list_runs(folder)}
                names = [unquote(name) for name in group.split("+")]
                if len(names) > MAX_RUNS or not runs.keys() >= set(names):
                    return None
                if len(reports) > _KEPT:
                    reports.clear()  # they are read again when they are asked for
                reports[group] = [Source.of(runs[name], name) for name in names]
            return _report(reports[group], f"/{name}")

        super().__init__(answer, port)


def _report(sources: Sequence[Source], path: str) -> Answer | None:
    return _answer(path, lambda: contents(sources, is_live=True), page)


def _answer(path: str, data: Callable[[], dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> Answer | None:
    """Return the page at "/", and its data at "/data.json"."""
    if path == "/":
        return "text/html", text(data())
    if path == "/data.json":
        return "application/json", json.dumps(data(), allow_nan=False, separators=(",", ":"))
    return None
