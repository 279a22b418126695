"""The HTML page of a report, in one self-contained file."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.atomic_files import ESCAPED, replace_file
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.run_status import run_folders

REPORT_FILE = "report.html"
_SCRIPTS = ("format.js", "elements.js", "theme.js", "chart.js", "save_chart.js", "tables.js", "page.js")
MAX_RUNS = 24  # more curves cannot be told apart


def write_report(sources: Sequence[Source], file: Path) -> Path:
    """Write a report of some runs atomically, and return its path.

    Args:
        sources: The runs.
        file: The file to write.
    """
    text = page(contents(sources))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    return file


def find_runs(paths: Sequence[AnyPath]) -> list[Source]:
    """Return the runs at some paths: run folders, history files of `JsonlLog`, and folders that contain runs.

    Raises:
        ConfigurationError: If a path has no run, or there are too many runs to compare.
    """
    runs: list[AnyPath] = []
    for path in paths:
        inside = [path] if path.is_file() else sorted(run_folders(path), key=str)
        if not inside:
            problem = "has no run: no run.json or history.jsonl" if path.is_dir() else "does not exist"
            raise ConfigurationError(
                f"{path.absolute()} {problem}. Give the folder of a run, output_dir/RUN_ID, or its history file."
            )
        runs += [run for run in inside if run not in runs]
    if len(runs) > MAX_RUNS:
        raise ConfigurationError(
            f"A report compares at most {MAX_RUNS} runs (got {len(runs)}). Name the runs to compare; "
            "`trainer-lib runs` lists them."
        )
    return [Source.of(path, name) for path, name in zip(runs, _names(runs), strict=True)]


def page(data: dict[str, Any]) -> str:
    """Return the HTML page for the data of `contents`."""
    return fill_page(", ".join(run["name"] for run in data["runs"]), data, _SCRIPTS)


def fill_page(title: str, data: dict[str, Any], scripts: Sequence[str]) -> str:
    """Return a page that some scripts draw from its data.

    Args:
        title: The title of the page.
        data: The data, as JSON types.
        scripts: The files in the folder `page`, in order.
    """
    script = "\n".join(_asset(name) for name in scripts)
    fills = {
        "title": html.escape(f"{title} · trainer_lib"),
        # Only this script runs, whatever names and values contain, and nothing is fetched.
        "policy": html.escape(_policy(script, data["live"])),
        "style": _asset("page.css"),
        "data": _as_script(data),
        "script": script,
    }
    parts = _asset("page.html").split("{{")
    text = parts[0] + "".join(fills[name] + rest for name, _, rest in (part.partition("}}") for part in parts[1:]))
    return text.encode(errors=ESCAPED).decode()


def _names(paths: Sequence[AnyPath]) -> list[str]:
    names = [path.resolve().name.removesuffix(".jsonl") for path in paths]
    if len(set(names)) == len(names):
        return names
    return [str(path) for path in paths]


def _policy(script: str, is_live: bool) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connects = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connects}; base-uri 'none'; form-action 'none'"
    )


def _as_script(data: dict[str, Any]) -> str:
    """Return values as JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _asset(name: str) -> str:
    return files("trainer_lib.runs.report").joinpath("page", name).read_text("utf-8")
