"""Live charts of a run in a notebook."""

import html
import time
from typing import Any, ClassVar

from trainer_lib.callbacks.console import line_of
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import require
from trainer_lib.runs.report.charts import charts_of
from trainer_lib.runs.report.svg import draw_curves

_HIDDEN_CHARTS = ("samples", "tokens", "data-wait", "memory", "steps", "momentum")  # shown in the report only


class NotebookChart(Callback):
    """Draws losses, metrics, learning rate and gradient norm below a notebook's cell, and updates the charts in place.

    Rank 0 draws, at most once every `seconds`, and only in steps that log or evaluate. The last charts stay in the
    notebook. They are embedded, and need no network.

    Args:
        seconds: The shortest time between two updates.

    Example:
        >>> chart = NotebookChart()  # Trainer(model, args, callbacks=[chart])
        >>> chart.on_log(Run(), {"loss": 0.5})
        >>> "loss 0.5" in chart.picture()
        True
    """

    order = 100  # after the callbacks that add values to the log
    is_display: ClassVar[bool] = True

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._handle: Any = None  # of the displayed output
        self._next = 0.0  # when to draw next
        self._line = ""

    def picture(self) -> str:
        """Return the current charts as HTML."""
        charts = [chart for chart in charts_of(self._curves) if chart["id"] not in _HIDDEN_CHARTS]
        drawn = [draw_curves(chart["title"], {name: self._curves[name] for name in chart["names"]}) for chart in charts]
        line = f'<div style="font: 12px system-ui, sans-serif; opacity: .8">{html.escape(self._line)}</div>'
        return f'<div style="display: flex; flex-wrap: wrap; gap: 8px">{"".join(drawn)}</div>{line}'

    def on_fit_begin(self, run: Run) -> None:
        self._curves, self._line, self._next = {}, "", 0.0
        for entry in run.state.history:  # of a resumed run
            self._take(entry, entry["step"])
        if run.is_main_process:
            self._handle = _display(self.picture())

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._add(run, values)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status != "new":  # "new": an evaluation outside a run
            self._add(run, metrics)

    def on_fit_end(self, run: Run) -> None:
        self._line = f"{self._line} ({run.state.status})"
        self._next = 0.0
        self._draw()
        self._handle = None

    def _add(self, run: Run, values: dict[str, float]) -> None:
        self._take(values, run.state.step)
        self._line = line_of(run, values)
        self._draw()

    def _take(self, values: dict[str, Any], step: float) -> None:
        for name, value in values.items():
            if name not in ("step", "epoch") and isinstance(value, (int, float)):
                self._curves.setdefault(name, []).append((step, float(value)))

    def _draw(self) -> None:
        if self._handle is not None and time.monotonic() >= self._next:
            self._handle.update(_html(self.picture()))
            self._next = time.monotonic() + self._seconds


def _display(text: str) -> Any:
    interactive = require("IPython", "notebook")
    if interactive.get_ipython() is None:
        raise ConfigurationError(
            "NotebookChart works only in a notebook, and this is not a notebook. Use ProgressBar or Printer instead."
        )
    from IPython.display import display

    return display(_html(text), display_id=True)


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)
