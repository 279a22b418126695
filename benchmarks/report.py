"""Output of the figures as a table, Markdown or JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Comparison, Row, Sample, Spread

_TO = "\N{EN DASH}"
_COLUMNS = ["", "CPU time", "time", "CPU ratio", "calm", "time ratio", "calls", "memory", "target"]


def table(comparisons: Sequence[Comparison]) -> str:
    """Return one table for a terminal."""
    cells = {comparison.name: [_cells(row) for row in comparison.rows] for comparison in comparisons}
    lines = [_COLUMNS, *(line for rows in cells.values() for line in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    text = [_line(_COLUMNS, widths)]
    for comparison in comparisons:
        text += [rule, comparison.title.replace("`", "")]
        text += [_line([cell.replace("`", "") for cell in line], widths) for line in cells[comparison.name]]
    return "\n".join(text)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a section with a table for each scenario."""
    text: list[str] = []
    for comparison in comparisons:
        text += [f"### {comparison.title}", ""]
        head, *lines = _without_empty([_COLUMNS, *(_cells(row) for row in comparison.rows)])
        text += [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 2) + "|---|"]
        text += [f"| {' | '.join(line)} |" for line in lines]
        text += [""]
        if peers := ahead(comparison):
            text += [f"Ahead of `trainer_lib` here: {', '.join(peers)}.", ""]
    return "\n".join(text)


def write_json(path: Path, machine: str, settings: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Write everything that was measured, run by run."""
    scenarios = {
        comparison.name: {row.contestant: _plain(row) for row in comparison.rows} for comparison in comparisons
    }
    path.write_text(json.dumps({"machine": machine, **settings, "scenarios": scenarios}, indent=1) + "\n")


def read_json(path: Path, titles: Mapping[str, str]) -> tuple[dict[str, Any], list[Comparison]]:
    """Return the settings of a run, and what it measured, with the scenarios' titles of today."""
    run = json.loads(path.read_text())
    scenarios: dict[str, dict[str, Any]] = run.pop("scenarios")
    return run, [
        Comparison(name=name, title=titles[name], rows=_rows(list(rows.items()))) for name, rows in scenarios.items()
    ]


def ahead(comparison: Comparison) -> list[str]:
    """Return the contestants that take less processor time than `trainer_lib`, with their ratios to it."""
    ours = [row for row in comparison.rows if row.contestant == "trainer_lib" and row.samples]
    others = [
        row for row in comparison.rows if row.samples and not row.contestant.startswith(("by hand", "trainer_lib"))
    ]
    pairs = [
        (other.contestant, median(a.cpu / b.cpu for a, b in zip(other.samples, row.samples, strict=True)))
        for row in ours
        for other in others
    ]
    return [f"{name} ({ratio:.2f} of its time)" for name, ratio in pairs if ratio < 1]


def _plain(row: Row) -> dict[str, Any]:
    if row.note:
        return {"note": row.note} | ({"target": row.target} if row.target else {})
    return {
        "target": row.target,
        "calls": row.calls,
        "cpu": [sample.cpu for sample in row.samples],
        "wall": [sample.wall for sample in row.samples],
        "memory": [sample.memory for sample in row.samples],
        "has_baseline": bool(row.baseline),
    }


def _rows(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    samples = {
        name: [Sample(*numbers) for numbers in zip(row["cpu"], row["wall"], row["memory"], strict=True)]
        for name, row in rows
        if "note" not in row
    }
    return [
        Row(
            contestant=name,
            samples=samples.get(name, ()),
            baseline=samples[rows[0][0]] if row.get("has_baseline") else (),
            calls=row.get("calls"),
            note=row.get("note", ""),
            target=row.get("target", ""),
        )
        for name, row in rows
    ]


def _cells(row: Row) -> list[str]:
    if row.note:
        return [row.contestant, row.note, *[""] * (len(_COLUMNS) - 3), row.target]
    calls = "" if row.calls is None else f"{row.calls:.0f}"
    ratios = ["1"] * 3 if row.baseline else [""] * 3
    if row.baseline and row.samples != row.baseline:
        ratios = [_ratio(row.cpu_ratio), f"{row.calm_ratio:.3f}", _ratio(row.wall_ratio)]
    memory = f"{row.memory / 2**20:.0f} MB" if row.memory else ""
    return [row.contestant, _seconds(row.cpu.median), _seconds(row.wall.median), *ratios, calls, memory, row.target]


def _without_empty(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the lines without columns that have a head and nothing below it, but for the last one."""
    columns = list(zip(*lines, strict=True))
    kept = [*(column for column in columns[:-1] if any(column[1:])), columns[-1]]
    return [list(line) for line in zip(*kept, strict=True)]


def _seconds(seconds: float) -> str:
    factor, unit = next((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * f >= 1 or f == 1e6)
    return f"{seconds * factor:.{2 if seconds * factor < 10 else 0}f} {unit}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.2f}{_TO}{spread.high:.2f})"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([*padded, cells[-1]]).rstrip()
