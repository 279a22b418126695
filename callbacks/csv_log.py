"""This file is what is logged and evaluated as a table that every program reads."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import replace_file

_PLACE = ("step", "epoch", "samples", "seconds")


class CsvLog(Callback):
    """Writes a row of a CSV file for each log and each evaluation; the main process does.

    Columns are step, epoch, samples, seconds of training, and the names of the values; a value that comes later adds
    one, which is empty in the rows before. Each row is written at once. A resumed run takes out the rows after the step
    it goes on from. A new run puts an older file of this name aside, as `<name>.old`.

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

    order = 100  # after those who add to what is logged

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._columns = list[str]()

    def on_fit_begin(self, run: Run) -> None:
        if not run.is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = list(_PLACE)
        if run.state.step:
            self._keep_up_to(run.state.step)
        elif self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        if run.state.status == "running" and run.is_main_process and self._columns:  # it went back
            self._keep_up_to(run.state.step)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._add(run, values)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status == "running":
            self._add(run, metrics)

    def _add(self, run: Run, values: Mapping[str, Any]) -> None:
        if not run.is_main_process:
            return
        state = run.state
        place = {
            "step": state.step,
            "epoch": state.epochs,
            "samples": state.samples,
            "seconds": round(state.seconds, 3),
        }
        row = {**place, **{name: value for name, value in values.items() if name not in place}}
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._write(self._rows())
        elif not self.path.exists():
            self._write([])
        with self.path.open("a", encoding="utf-8", newline="") as file:
            self._writer(file).writerow(row)

    def _keep_up_to(self, step: int) -> None:
        self._write([row for row in self._rows() if row["step"].isdigit() and int(row["step"]) <= step])

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file, whose columns become those of this; a row that was cut short is left out."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values() and None not in row]
            there = list(reader.fieldnames or ())
        self._columns = [*there, *(name for name in self._columns if name not in there)]
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = self._writer(file)
                writer.writeheader()
                writer.writerows(rows)

        replace_file(self.path, write)

    def _writer(self, file: Any) -> "csv.DictWriter[str]":
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
