"""The data of a report: downsampled curves, tables and figures, as JSON."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.runs.report.charts import charts_of
from trainer_lib.runs.report.downsampling import means, thin
from trainer_lib.runs.report.formatting import duration, flat, short
from trainer_lib.runs.report.sample_tables import is_sample_table, sample_tables
from trainer_lib.runs.report.timeline_marks import marks, saves
from trainer_lib.runs.run_history import PLACES, History, numbers_in
from trainer_lib.runs.run_status import facts_of, history_file, standing

_POINTS = 1500  # per curve: more than a screen has columns
_MEANS = 300
_ROWS = 500  # in the table of evaluations


@dataclass(repr=False, eq=False)
class Source(LightDataclass):
    """A run in a report.

    Args:
        name: The run's name in the report.
        place: The run's path.
        history: The run's history, read incrementally.
        facts: A function that returns the contents of the run file.
    """

    name: str
    place: str
    history: History
    facts: Callable[[], Mapping[str, Any]]

    @classmethod
    def of(cls, path: AnyPath, name: str | None = None) -> "Source":
        """Return the run of a folder or a history file; for a URL its current state."""
        if isinstance(path, Path) and path.is_file():
            return cls(name or path.stem, str(path), History(path), dict)
        return cls(name or path.resolve().name, str(path), History(history_file(path)), lambda: facts_of(path))


def contents(sources: Sequence[Source], is_live: bool = False) -> dict[str, Any]:
    """Return the data of a report, as JSON types."""
    runs = [_run(source) for source in sources]
    names = dict.fromkeys(name for run in runs for name in run["curves"])
    return {"written": time.time(), "live": is_live, "charts": charts_of(names), "runs": runs}


def _run(source: Source) -> dict[str, Any]:
    history, facts = source.history.read(), source.facts()
    state: Mapping[str, Any] = facts.get("state") or {}
    best = _best(history, state)
    tables: dict[bytes, int] = {}
    places: list[dict[str, Any]] = []
    curves = {name: _curve(history, name, tables, places) for name in history.curves}
    status = standing(facts, history.last, float(history.last.get("time") or history.heard))
    return {
        "name": source.name,
        "path": source.place,
        "status": status,
        "reason": str(state.get("reason") or "") if status not in ("running", "died", "silent") else "",
        "traceback": _traceback(history),
        "figures": _figures(history, facts, best),
        "curves": curves,
        "places": places,
        "marks": marks([entry for entry in history.events if not is_sample_table(entry)]),
        "evaluations": _evaluations(history, best),
        "samples": sample_tables(history.events),
        "checkpoints": saves(
            history.events, state.get("checkpoints") or (), None if best is None else best["step"], source.place
        ),
        "arguments": flat(facts.get("arguments") or {}),
        "environment": flat({name: _readable(name, value) for name, value in (facts.get("environment") or {}).items()}),
    }


def _curve(history: History, name: str, tables: dict[bytes, int], places: list[dict[str, Any]]) -> dict[str, Any]:
    curve = history.curves[name]
    rows, values = np.asarray(curve.rows), np.asarray(curve.values)
    by_step = np.argsort(history.places(rows)["step"], kind="stable")  # evaluations beside the run come later
    rows, values = rows[by_step], values[by_step]
    kept = thin(values, _POINTS)
    data: dict[str, Any] = {
        "at": _place_table(history, rows[kept], tables, places),
        "values": [_number(value) for value in values[kept].tolist()],
        "count": len(values),
        "broken": int((~np.isfinite(values)).sum()),
    }
    if len(kept) < len(values):  # smoothing the kept values would overweight extremes
        middles = means(np.arange(len(values)), _MEANS).astype(int)
        data["means"] = {
            "at": _place_table(history, rows[middles], tables, places),
            "values": [_number(value) for value in means(values, _MEANS).tolist()],
        }
    return data


def _place_table(history: History, rows: Any, tables: dict[bytes, int], places: list[dict[str, Any]]) -> int:
    """Return the index of the table of steps, epochs, samples and seconds of some rows; curves share tables."""
    key = rows.tobytes()
    if key not in tables:
        tables[key] = len(places)
        columns = history.places(rows)
        places.append({name: [_number(value, 8) for value in columns[name].tolist()] for name in PLACES})
    return tables[key]


def _number(value: float, digits: int = 6) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{digits}g}")


def _best(history: History, state: Mapping[str, Any]) -> dict[str, Any] | None:
    records = [entry for entry in history.events if entry["event"] == "best"]
    if records:
        return {name: records[-1].get(name) for name in ("metric", "value", "step")}
    return dict(state["best"]) if state.get("best") else None


def _traceback(history: History) -> str:
    """Return the traceback of the error that ended the run, if its last process ended with one."""
    ends = [entry for entry in history.events if entry["event"] in ("started", "resumed", "ended")]
    return str(ends[-1].get("traceback") or "") if ends else ""


def _figures(history: History, facts: Mapping[str, Any], best: Mapping[str, Any] | None) -> list[list[str]]:
    """Return the key figures of a run."""
    last, begun = history.last, [entry for entry in history.events if entry["event"] in ("started", "resumed")]
    total = begun[-1].get("max_steps") if begun else None
    figures: list[list[str]] = []
    if last:
        step = short(last["step"])
        figures.append(["Steps", step if total in (None, last["step"]) else f"{step} of {short(total)}"])
        figures.append(["Epochs", short(last.get("epoch"))])
        figures.append(["Samples", short(last.get("samples"))])
        figures.append(["Time of training", duration(float(last.get("seconds") or 0))])
    if begun:
        figures.append(["Processes", short(begun[-1].get("processes"))])
    if best is not None:
        figures.append([f"Best {best['metric']}", f"{short(best['value'])} at step {short(best['step'])}"])
    for name, title in (("loss", "Loss"), ("eval_loss", "Evaluation loss"), ("samples_per_second", "Samples a second")):
        if name in history.curves:
            figures.append([title, short(float(history.curves[name].values[-1]))])
    for name, title in (("host_memory", "Memory, most"), ("device_memory_peak", "Device memory, most")):
        if name in history.curves:
            figures.append([title, convert_bytes(int(np.nanmax(history.curves[name].values)))])
    created = facts.get("created") or (begun[0].get("time") if begun else None)
    if created:
        figures.append(["Begun", time.strftime("%Y-%m-%d %H:%M", time.localtime(created))])
    return figures


def _evaluations(history: History, best: Mapping[str, Any] | None) -> dict[str, Any]:
    evaluations = sorted(history.evaluations, key=lambda entry: entry["step"])
    columns = dict.fromkeys(name for entry in evaluations for name in numbers_in(entry))
    shown = evaluations[-_ROWS:]
    if best is not None:
        shown = [entry for entry in evaluations[:-_ROWS] if entry["step"] == best["step"]] + shown
    rows = [
        {
            "step": entry["step"],
            "epoch": _number(float(entry.get("epoch") or 0)),
            "values": [_text(numbers_in(entry).get(name)) for name in columns],
            "is_best": best is not None and entry["step"] == best["step"],
        }
        for entry in shown
    ]
    left_out = len(evaluations) - len(rows)
    return {
        "columns": list(columns),
        "rows": rows,
        "left_out": left_out,
        "best": None if best is None else best["metric"],
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _readable(name: str, value: Any) -> Any:
    return convert_bytes(value) if name == "memory" and isinstance(value, int) else value
