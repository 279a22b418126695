"""This file is the report of runs: one page of HTML that holds everything it needs."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.run_status import is_run

REPORT_FILE = "report.html"
_SCRIPTS = ("format.js", "elements.js", "chart.js", "tables.js", "page.js")
_MOST = 24  # runs in a report of a folder of runs: more cannot be told apart


def write_report(sources: Sequence[Source], file: Path) -> Path:
    """Write a report of some runs, whole or not at all, and return where it is.

    Args:
        sources: The runs.
        file: Where to.
    """
    text = page(contents(sources))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    return file


def find_runs(paths: Sequence[AnyPath]) -> list[Source]:
    """Return the runs that paths mean: folders of runs, files as `JsonlLog` writes them, and folders that hold runs.

    Raises:
        ConfigurationError: If there is none, or so many that nobody could tell their curves apart.
    """
    found: list[AnyPath] = []
    for path in paths:
        if path.is_file() or is_run(path):
            inside = [path]
        else:
            inside = sorted((child for child in path.glob("*") if child.is_dir() and is_run(child)), key=str)
        if not inside:
            what = "has no run: no run.json or history.jsonl" if path.is_dir() else "is not there"
            raise ConfigurationError(
                f"{path} {what}. Give the folder of a run, output_dir/RUN_ID, or its history file."
            )
        found += [one for one in inside if one not in found]
    if len(found) > _MOST:
        raise ConfigurationError(
            f"These are {len(found)} runs, and a report compares at most {_MOST}. Name those that you want to see; "
            "`trainer-lib runs` lists them."
        )
    return [Source.of(path, name) for path, name in zip(found, _names(found), strict=True)]


def page(told: dict[str, Any]) -> str:
    """Return the page that says what `contents` returned."""
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    names = ", ".join(run["name"] for run in told["runs"])
    fills = {
        "title": html.escape(f"{names} · trainer_lib"),
        # Nothing but this very script runs, whatever a name or a value may hold; and nothing is fetched.
        "policy": html.escape(_policy(script, told["live"])),
        "style": _asset("page.css"),
        "data": _as_script(told),
        "script": script,
    }
    parts = _asset("page.html").split("{{")
    return parts[0] + "".join(fills[name] + rest for name, _, rest in (part.partition("}}") for part in parts[1:]))


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


def _as_script(told: dict[str, Any]) -> str:
    """Return values as JSON that ends no element, whatever texts there are in it."""
    text = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _asset(name: str) -> str:
    return files("trainer_lib.runs.report").joinpath("page", name).read_text("utf-8")
