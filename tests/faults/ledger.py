"""Counts of the faults that the suite injects and their outcomes, and docs/faults.md, which is made from them.

python -m pytest -m fault --soak    # counts, and writes outcomes.json if no test fails
python -m tests.faults.ledger       # writes the page
"""

import json
from collections.abc import Mapping
from pathlib import Path

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

Table = dict[str, dict[str, int]]  # the counts of each row, by the key of the column


class Ledger:
    """Counts, in tables of rows."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def note(self, table: str, row: str, **counts: int) -> None:
        """Add counts to a row."""
        totals = self.tables.setdefault(table, {}).setdefault(row, dict.fromkeys(_COLUMNS[table], 0))
        for name, count in counts.items():
            totals[name] += count

    def write(self) -> None:
        """Write the counts to outcomes.json, replacing rows of the same names."""
        known = recorded() if OUTCOMES.exists() else {}
        tables = {table: {**known.get(table, {}), **self.tables.get(table, {})} for table in _COLUMNS}
        OUTCOMES.write_text(json.dumps({name: rows for name, rows in tables.items() if rows}, indent=1) + "\n")


# The columns of each table: the key and the heading.
_COLUMNS: dict[str, dict[str, str]] = {
    "kills": {
        "kills": "kills",
        "inside": "inside a save",
        "unloadable": "damaged checkpoints",
        "resumed": "resumed from the last commit",
        "equal": "bitwise equal",
    },
    "damage": {
        "injected": "how often",
        "noticed": "detected",
        "named": "file named",
        "used": "loaded anyway",
    },
    "disks": {
        "injected": "how often",
        "told": "error with path and reason",
        "whole": "previous checkpoint intact",
        "went_on": "next save intact",
    },
    "content": {
        "injected": "how often",
        "refused": "refused",
        "harmless": "read, because nothing was wrong",
        "executed": "code run",
    },
    "stops": {
        "asked": "how often",
        "agreed": "both ranks ended after the same step, with its exit code",
        "equal": "resumed, bitwise equal",
    },
    "guards": {
        "injected": "how often",
        "kept": "behaved as documented",
    },
    "runs": {
        "compared": "runs",
        "equal": "bitwise equal",
    },
    "worlds": {
        "compared": "runs",
        "same_samples": "same samples in the same updates",
        "same_losses": "losses equal to 1e-6",
    },
}

# The columns that do not apply to some rows, such as the next save on a disk that stays read-only.
_MAY_BE_NONE = {"told", "went_on", "harmless"}

_TEXTS = {
    "kills": (
        "Kills",
        "Another process sends `SIGKILL` at a random moment after the first save, every second time during a save. The "
        "next process resumes in the same folder, and is killed in turn. Before training, it compares weights and "
        "optimizer with those at the time of the save; a run of the Trainer is compared with an uninterrupted one.",
    ),
    "damage": (
        "Damaged checkpoints",
        "A checkpoint is damaged, read, and repaired again. The position of each damage is random.",
    ),
    "disks": (
        "Full and failing disks",
        "A full file system of 4 MB (tmpfs), a limit on the size of files (`RLIMIT_FSIZE`) on one rank, an `fsync` "
        "that fails, a folder or a file system without write permission.",
    ),
    "content": (
        "Malicious files",
        "Files that an attacker added or changed, with a manifest that has the right sizes, checksums and digest. If a "
        "pickle in one of them ran, it would leave a file behind.",
    ),
    "stops": (
        "Signals",
        "Signals are sent at a random moment to one of two ranks, or to both; within five seconds, both ranks have "
        "saved and ended.",
    ),
    "guards": (
        "Failures during training",
        "NaN and Inf in losses and gradients, ranks and workers that hang or die, unreadable samples, out of memory. "
        "Weights and losses are compared with those of a run that skips the same samples or updates, or has no fault; "
        "messages must name the rank, step, sample and worker, as far as they apply.",
    ),
    "runs": (
        "Resumed runs",
        'A run of the Trainer ends after some step and is resumed in a new process with `resume="auto"`. Its history '
        "of losses, learning rates and evaluations, and its weights, are compared with those of an uninterrupted run.",
    ),
    "worlds": (
        "Resuming with another world size",
        "A checkpoint of one world size, batch size and accumulation is resumed with another, in the middle of an "
        "epoch too.",
    ),
}

_HEAD = """# Faults

The tests inject faults into training, saving and resuming. This page lists the faults, how often they were injected,
and the outcomes. Some of them run with the tests of each version; the figures are from the long run, `make soak`, which
writes this page.
"""


def page(tables: Mapping[str, Table]) -> str:
    """Return the page that shows these counts."""
    parts = [_HEAD]
    for table, rows in tables.items():
        title, text = _TEXTS[table]
        columns = _COLUMNS[table]
        lines = [f"| | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
        for row, counts in rows.items():
            cells = [f"{counts[name]:,}" if counts[name] or name not in _MAY_BE_NONE else "" for name in columns]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        parts.append(f"## {title}\n\n{text}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def recorded() -> dict[str, Table]:
    """Return the recorded counts."""
    return json.loads(OUTCOMES.read_text())


if __name__ == "__main__":
    PAGE.write_text(page(recorded()))
