"""The HTML page of all runs in a folder, with search and sorting, in one self-contained file."""

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.runs.report.report_page import REPORT_FILE, fill_page
from trainer_lib.runs.run_summary import RunSummary, list_runs, name_of

_SCRIPTS = ("format.js", "elements.js", "theme.js", "tables.js", "runs.js")


def write_runs_page(folder: AnyPath, file: Path) -> Path:
    """Write the page of all runs in a folder atomically, and return its path.

    Args:
        folder: The folder of the runs.
        file: The file to write. Its links to the reports of the runs are relative to it.
    """
    data = runs_data(folder, file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda path: path.write_text(runs_page(data), encoding="utf-8"))
    return file


def runs_page(data: dict[str, Any]) -> str:
    """Return the HTML page for the data of `runs_data`."""
    return fill_page("Runs", data, _SCRIPTS)


def runs_data(folder: AnyPath, links_from: Path | None = None, is_live: bool = False) -> dict[str, Any]:
    """Return the runs in a folder, as JSON types.

    Args:
        folder: The folder of the runs.
        links_from: The folder of the page; reports are linked from there.
        is_live: Whether the page is served, and updated.
    """
    runs = [_row(run, folder, links_from) for run in list_runs(folder)]
    return {"written": time.time(), "live": is_live, "folder": str(folder), "runs": runs}


def _row(run: RunSummary, folder: AnyPath, links_from: Path | None) -> dict[str, Any]:
    row = dataclasses.asdict(run)
    best = run.best
    if best is not None and not math.isfinite(float(best.get("value") or 0)):
        best = best | {"value": None}
    return row | {
        "path": str(run.path),
        "name": name_of(run.path, folder),
        "best": best,
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "checkpoint": None if run.checkpoint is None else Path(run.checkpoint).name,
        "report": _link(run.path, links_from),
    }


def _link(run: AnyPath, links_from: Path | None) -> str | None:
    if links_from is None or not isinstance(run, Path) or not (run / REPORT_FILE).is_file():
        return None
    return "./" + quote(Path(os.path.relpath(run / REPORT_FILE, links_from)).as_posix())
