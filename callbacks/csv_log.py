"""Logs and evaluations of a run as a CSV table."""

import csv
import io
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import LogWrites, append_text, log_file, replace_file

_PROGRESS = ("step", "epoch", "samples", "seconds")
_WAITING = 10_000  # rows


class CsvLog(Callback):
    """Writes a row to a CSV file for each log and evaluation, on rank 0.

    The columns are step, epoch, samples, seconds of training, and the names of the values. A value that appears later
    adds a column, which is empty in earlier rows. Each row is written immediately; rows that cannot be written to disk
    are written later, with the next row that can. A resumed run removes the rows after the step it resumes from. A new
    run renames an existing file to `<name>.old`.

    Args:
        path: The file.

    Example:
        >>> from trainer_lib.events import RunState
        >>> log = CsvLog("history.csv")
        >>> log.on_fit_begin(Run())
        >>> log.on_log(Run(state=RunState(step=10, epoch=1, samples=80, seconds=2.5)), {"loss": 0.25})
        >>> print(Path("history.csv").read_text(), end="")
        step,epoch,samples,seconds,loss
        10,1.0,80,2.5,0.25
    """

    order = 100  # after the callbacks that add values to the log

    def __init__(self, path: str | Path) -> None:
        self.path: Path = log_file(path, "CsvLog")
        self._columns, self._resumed_at = list[str](), -1
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_WAITING)
        self._instead: list[dict[str, str]] | None = None  # the rows that are to replace those of the file
        self._writes = LogWrites("rows")

    def on_fit_begin(self, run: Run) -> None:
        if not run.is_main_process:
            return
        self._columns = list(_PROGRESS)
        self._resumed_at = run.state.step or -1
        if run.state.step:
            self._keep_up_to(run.state.step)
            return
        self._waiting.clear()
        self._instead = None
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        if run.state.status == "running" and run.is_main_process and self._columns:  # after a rewind
            self._keep_up_to(run.state.step)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._add(run, values)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status == "running":
            if run.state.step == self._resumed_at:
                self._remove_earlier(run.state.step, metrics)
            self._add(run, metrics)

    def _add(self, run: Run, values: Mapping[str, Any]) -> None:
        if not run.is_main_process:
            return
        state = run.state
        progress = {
            "step": state.step,
            "epoch": state.epochs,
            "samples": state.samples,
            "seconds": round(state.seconds, 3),
        }
        self._waiting.append({**progress, **{name: value for name, value in values.items() if name not in progress}})
        self._flush()

    def _flush(self) -> None:
        """Write the rows that wait; those that the disk does not take wait for the next call."""
        if self._writes.attempt(self.path, self._add_waiting):
            self._waiting.clear()
            self._instead = None

    def _add_waiting(self) -> None:
        columns = [*dict.fromkeys([*self._columns, *(name for row in self._waiting for name in row)])]
        if columns != self._columns or self._instead is not None or not self.path.exists():
            self._instead = rows = self._rows()
            columns = [*dict.fromkeys([*self._columns, *columns])]
            self._write([*rows, *self._waiting], columns)
            self._columns: list[str] = columns
        else:
            text = io.StringIO()
            _writer(text, columns).writerows(self._waiting)
            append_text(self.path, text.getvalue())

    def _keep_up_to(self, step: int) -> None:
        for row in [row for row in self._waiting if row["step"] > step]:
            self._waiting.remove(row)
        rows = [row for row in self._rows() if row["step"].isdigit() and int(row["step"]) <= step]
        self._instead: list[dict[str, str]] | None = rows
        self._flush()

    def _remove_earlier(self, step: int, names: Collection[str]) -> None:
        """Remove the row of an evaluation that the checkpoint owed, if a program that was killed has made it too."""
        rows = self._rows()
        kept = [row for row in rows if row["step"] != str(step) or not all(row.get(name) for name in names)]
        if len(kept) < len(rows):
            self._instead = kept

    def _rows(self) -> list[dict[str, str]]:
        """Return the complete rows of the file, and take over its columns."""
        if self._instead is not None:
            return self._instead
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values() and None not in row]
            existing = list(reader.fieldnames or ())
        self._columns = [*existing, *(name for name in self._columns if name not in existing)]
        return rows

    def _write(self, rows: Iterable[Mapping[str, Any]], columns: list[str]) -> None:
        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = _writer(file, columns)
                writer.writeheader()
                writer.writerows(rows)

        replace_file(self.path, write)


def _writer(file: Any, columns: list[str]) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, columns, restval="", lineterminator="\n")
