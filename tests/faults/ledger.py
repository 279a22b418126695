"""This file is what the suite has injected and what came out, counted; and docs/faults.md, which is made from that.

python -m pytest -m fault --soak    # counts, and writes outcomes.json if all went well
python -m tests.faults.ledger       # writes the page
"""

import json
from collections.abc import Mapping
from pathlib import Path

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

Table = dict[str, dict[str, int]]  # by the name of a row, counts by what was counted


class Ledger:
    """Counts, in tables of rows."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def note(self, table: str, row: str, **counts: int) -> None:
        """Add to what was counted before."""
        held = self.tables.setdefault(table, {}).setdefault(row, dict.fromkeys(_COLUMNS[table], 0))
        for name, count in counts.items():
            held[name] += count

    def write(self) -> None:
        """Write all down, in the place of what was written of the same rows."""
        known = recorded() if OUTCOMES.exists() else {}
        tables = {table: {**known.get(table, {}), **self.tables.get(table, {})} for table in _COLUMNS}
        OUTCOMES.write_text(json.dumps({name: rows for name, rows in tables.items() if rows}, indent=1) + "\n")


# What is counted, and how a table calls it. What must be 0 comes with what says so.
_COLUMNS: dict[str, dict[str, str]] = {
    "kills": {
        "kills": "kills",
        "inside": "inside a save",
        "unloadable": "states not whole",
        "resumed": "gone on from the last commit",
        "equal": "equal to the bit",
    },
    "damage": {
        "injected": "how often",
        "noticed": "noticed",
        "named": "file named",
        "used": "used all the same",
    },
    "disks": {
        "injected": "how often",
        "told": "told, with path and reason",
        "whole": "state before whole",
        "went_on": "next save good",
    },
    "content": {
        "injected": "how often",
        "refused": "refused",
        "harmless": "read, as nothing was wrong",
        "executed": "code run",
    },
    "stops": {
        "asked": "how often",
        "agreed": "both ended after the same step, with its exit code",
        "equal": "gone on with, equal to the bit",
    },
    "guards": {
        "injected": "how often",
        "kept": "came out as said",
    },
    "runs": {
        "compared": "runs",
        "equal": "equal to the bit",
    },
    "worlds": {
        "compared": "runs",
        "same_samples": "same samples in the same updates",
        "same_losses": "losses equal to 1e-6",
    },
}

# What there is nothing of in some rows: no error where nothing is wrong, no next save on a disk that stays as it is.
_MAY_BE_NONE = {"told", "went_on", "harmless"}

_TEXTS = {
    "kills": (
        "Killed",
        "`SIGKILL`, from outside, at a random moment after the first save of a process; every second time while a save "
        "is under way. The next process goes on in the same folder and is killed in its turn. Before it trains it "
        "compares weights and optimizer with what was there when that state was saved; a run of the Trainer is "
        "compared with one that nobody disturbed.",
    ),
    "damage": (
        "Damaged",
        "A state is damaged, read, and made whole again. Of each kind of damage the place is random.",
    ),
    "disks": (
        "Out of disk",
        "A file system of 4 MB that is filled up (tmpfs), a limit on the size of files (`RLIMIT_FSIZE`) on one "
        "process, an `fsync` that fails, a folder or a file system that cannot be written to.",
    ),
    "content": (
        "Made to do harm",
        "Files that somebody put there, or changed, together with a manifest that has the right sizes, checksums and "
        "digest for them. A pickle in any of them would leave a file behind if it ran.",
    ),
    "stops": (
        "Asked to end",
        "Signals at a random moment to one of two processes, or to both; within five seconds both have saved and "
        "ended.",
    ),
    "guards": (
        "Gone wrong on the way",
        "Losses and gradients that are no numbers, processes and workers that stop or die, samples that cannot be "
        "read, memory that does not suffice. Weights and losses are compared with those of a run in which the same is "
        "left out, or nothing is wrong; messages have to name process, step, sample and worker as far as there are "
        "any.",
    ),
    "runs": (
        "Interrupted, and gone on with",
        'A run of the Trainer that ends after some step, in a new process by `resume="auto"`: the history of losses, '
        "rates and evaluations, and the weights, next to those of the run without a break.",
    ),
    "worlds": (
        "Gone on with by other processes",
        "Saved by one number of processes, with their batch and accumulation, and taken up by another, in the middle "
        "of a pass too.",
    ),
}

_HEAD = """# Faults

What is done to training, saving and resuming in the tests, how often, and what came of it. A part of it runs with the
tests of each version; the figures are those of the long run, `make soak`, which writes this page.
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
    """Return what was written down."""
    return json.loads(OUTCOMES.read_text())


if __name__ == "__main__":
    PAGE.write_text(page(recorded()))
