"""Tables as aligned text, and as tables of trackers."""

from collections.abc import Sequence
from typing import Any

from trainer_lib.callbacks.trackers import trackers_of
from trainer_lib.events import Run


def aligned(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text, with text left-aligned and numbers right-aligned.

    Example:
        >>> print(aligned(["layer", "parameters"], [["0", 1200], ["2", 8]]))
        layer  parameters
        0           1,200
        2               8
    """
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows]
    is_number = [any(isinstance(row[index], int) for row in rows) for index in range(len(columns))]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in [list(columns), *cells]
    )


def show_table(run: Run, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
    """Send a table to the run's trackers that support tables; return whether there is one."""
    shown = False
    for tracker in trackers_of(run):
        if tracker.takes("log_table"):
            data = [list(row) for row in rows]
            tracker.log_table(name, columns=list(columns), data=data, step=run.state.step)
            shown = True
    return shown
