"""Plain-text output of a run: a line per log and evaluation."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TextIO

from trainer_lib.events import Callback, Run
from trainer_lib.runs.report.sparkline import shows_sparklines, sparkline


class Printer(Callback):
    """Prints a line for each log and evaluation, and a table of all evaluations at the end, on rank 0.

    Args:
        file: Where to print; by default standard output.

    Example:
        >>> from trainer_lib.events import RunState
        >>> run = Run(state=RunState(step=50, max_steps=200, epoch=1))
        >>> Printer().on_log(run, {"loss": 0.34567, "learning_rate": 5e-05})
        step 50/200, epoch 1: loss 0.3457, learning_rate 5e-05
    """

    order = 100  # after the callbacks that add values to the log
    is_display: ClassVar[bool] = True

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._metrics: dict[str, None] = {}  # the names seen in evaluations, in order

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._print(run, line_of(run, values))

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status == "running":
            self._metrics.update(dict.fromkeys(metrics))
        if metrics:
            self._print(run, line_of(run, metrics))

    def on_best(self, run: Run, metric: str, value: float) -> None:
        self._print(run, f"step {run.state.step}: best {metric} so far, {_short(value)}")

    def on_fit_end(self, run: Run) -> None:
        if rows := [entry for entry in run.state.history if entry.keys() & self._metrics.keys()]:
            columns = ["step", "epoch", *self._metrics]
            table = [columns, *([_short(row.get(column, "")) for column in columns] for row in rows)]
            self._print(run, _aligned(table))
        file = self._file or sys.stdout
        if run.is_main_process and shows_sparklines(file):
            print_curves(run, file)

    def _print(self, run: Run, text: str) -> None:
        if run.is_main_process:
            print(text, file=self._file or sys.stdout, flush=True)


def print_curves(run: Run, file: TextIO) -> None:
    """Print the loss and the best metric of a run, each as a line with a sparkline."""
    best = [] if run.state.best is None else [run.state.best.metric]
    curves = {name: [entry[name] for entry in run.state.history if name in entry] for name in ("loss", *best)}
    width = max(map(len, curves))
    for name, values in curves.items():
        if len(values) > 1:
            print(f"{name:<{width}}  {sparkline(values)}  {_short(values[0])} → {_short(values[-1])}", file=file)


def line_of(run: Run, values: Mapping[str, Any]) -> str:
    """Return a line with these values, and with the run's step and epoch if it has trained."""
    state = run.state
    of = "" if state.max_steps is None else f"/{state.max_steps}"
    shown = ", ".join(f"{name} {_short(value)}" for name, value in values.items() if name not in ("step", "epoch"))
    if state.status == "new" and not state.step:
        return f"evaluation: {shown}"
    return f"step {state.step}{of}, epoch {state.epochs:.4g}: {shown}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
