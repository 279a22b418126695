"""Timeline of a run: its events as marks on the axis and rows of a table."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import is_url
from trainer_lib.runs.report.formatting import duration, short
from trainer_lib.runs.run_folder import recorded_checkpoint
from trainer_lib.runs.run_history import PLACES

_SHOWN = 400  # per kind; a run may skip many steps
_LONGEST = 400  # characters of a callback's event; the history has the full text
_PLACED = (*PLACES, "time", "event")

Entry = Mapping[str, Any]


def marks(events: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the events in order, each with its position, kind, title and text."""
    shown: dict[str, int] = {}
    marks_reversed: list[dict[str, Any]] = []
    for entry in reversed(events):  # the newest events are kept
        name = str(entry["event"])
        shown[name] = shown.get(name, 0) + 1
        if shown[name] <= _SHOWN:
            kind, title, text = _describe(name, entry)
            position = {key: entry.get(key) for key in (*PLACES, "time")}
            marks_reversed.append({**position, "kind": kind, "title": title, "text": text})
    return marks_reversed[::-1]


def saves(events: Sequence[Entry], known: Sequence[Entry], best_step: int | None, folder: str) -> list[dict[str, Any]]:
    """Return the checkpoints, each with the facts recorded when it was saved, and whether it still exists.

    Args:
        events: The events of the run.
        known: The checkpoints in the run file, which also lists those saved while the run failed.
        best_step: The step of the best evaluation.
        folder: The run's folder.
    """

    def now(path: Any) -> str:
        return str(path) if is_url(folder) or is_url(path) else str(recorded_checkpoint(Path(folder), str(path)))

    saved = [entry for entry in events if entry["event"] == "save" and "path" in entry]
    checkpoints: dict[str, dict[str, Any]] = {
        now(entry["path"]): {**entry, "why": entry.get("reasons")} for entry in known[-_SHOWN:]
    }
    checkpoints |= {now(entry["path"]): dict(entry) for entry in saved[-_SHOWN:]}
    return [
        {
            "step": entry["step"],
            "epoch": entry.get("epoch"),
            "time": entry.get("time"),
            "name": Path(path).name,
            "path": path,
            "why": short(entry.get("why") or ["asked"]),
            "took": entry.get("took"),
            "is_there": None if is_url(path) else Path(path).is_dir(),
            "is_best": entry["step"] == best_step,
        }
        for path, entry in sorted(checkpoints.items(), key=lambda item: item[1]["step"])[-_SHOWN:]
    ]


def _describe(name: str, entry: Entry) -> tuple[str, str, str]:
    describe = _DESCRIPTIONS.get(name)
    if describe is not None:
        return describe(entry)
    facts = {key: value for key, value in entry.items() if key not in _PLACED}
    text = "; ".join(f"{key} {short(value)}" for key, value in facts.items())
    return "note", name.replace("_", " "), text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _started(entry: Entry) -> tuple[str, str, str]:
    return "start", "started", _process(entry)


def _resumed(entry: Entry) -> tuple[str, str, str]:
    lost = entry.get("steps_lost") or 0
    repeated = f"; {lost} steps repeated" if lost > 1 else "; 1 step repeated" if lost else ""
    return "resume", "resumed", _process(entry) + repeated


def _died(entry: Entry) -> tuple[str, str, str]:
    return "fail", "died", "killed; this is the last line it wrote"


def _ended(entry: Entry) -> tuple[str, str, str]:
    status = str(entry.get("status"))
    kind = {"finished": "end", "stopped": "end", "interrupted": "stop"}.get(status, "fail")
    return kind, status, str(entry.get("reason") or "")


def _saved(entry: Entry) -> tuple[str, str, str]:
    took = entry.get("took")
    why = ", ".join(map(str, entry.get("why") or ())) or "asked"
    name = Path(str(entry.get("path", ""))).name
    return "save", "saved", f"{name} ({why})" + (f" in {duration(took)}" if isinstance(took, float) else "")


def _best(entry: Entry) -> tuple[str, str, str]:
    return "best", "best so far", f"{entry.get('metric')} {short(entry.get('value'))}"


def _skipped(entry: Entry) -> tuple[str, str, str]:
    return "skip", "step skipped", str(entry.get("why") or "")


def _went_back(entry: Entry) -> tuple[str, str, str]:
    return "resume", "rewound", str(entry.get("why") or "")


def _left_out(entry: Entry) -> tuple[str, str, str]:
    return "skip", "left out", str(entry.get("why") or "")


def _not_saved(entry: Entry) -> tuple[str, str, str]:
    return "skip", "not saved", str(entry.get("why") or "")


def _missing(entry: Entry) -> tuple[str, str, str]:
    return "note", "not delivered", f"{entry.get('points')} points to {entry.get('tracker')}"


def _changed(entry: Entry) -> tuple[str, str, str]:
    changed = entry.get("changed")
    pairs: Any = changed.items() if isinstance(changed, Mapping) else ()
    return (
        "note",
        "changed arguments",
        "; ".join(f"{name}: {short(pair)}".replace(", ", " → ", 1) for name, pair in pairs),
    )


def _process(entry: Entry) -> str:
    count, precision = entry.get("processes", 1), entry.get("precision", "no")
    parts = [f"{count} {'process' if count == 1 else 'processes'} on {entry.get('device')}"]
    parts.append("full precision" if precision == "no" else str(precision))
    parts += [f"{name} {entry[name]}" for name in ("torch", "trainer_lib") if name in entry]
    return ", ".join(parts) + (f", host {entry['host']}" if entry.get("host") else "")


_DESCRIPTIONS: dict[str, Callable[[Entry], tuple[str, str, str]]] = {
    "started": _started,
    "resumed": _resumed,
    "died": _died,
    "ended": _ended,
    "save": _saved,
    "best": _best,
    "skipped": _skipped,
    "went_back": _went_back,
    "left_out": _left_out,
    "not_saved": _not_saved,
    "points_missing": _missing,
    "arguments": _changed,
}
