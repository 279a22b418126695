"""The charts of a report as pictures of their own, for papers and slides."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer_lib.foundation.imports import require
from trainer_lib.runs.report.charts import charts_of
from trainer_lib.runs.report.report_data import Source
from trainer_lib.runs.run_history import History


def write_charts(sources: Sequence[Source], folder: Path, kind: str = "svg") -> list[Path]:
    """Write each chart of some runs into a file, over the steps, and return the files.

    Args:
        sources: The runs; their curves share the charts.
        folder: The folder to write to.
        kind: The format: "svg", "png" or "pdf".
    """
    require("matplotlib", "plot")
    histories = [(source.name, source.history.read()) for source in sources]
    names = dict.fromkeys(name for _, history in histories for name in history.curves)
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(chart["title"], chart["names"], histories, folder, kind) for chart in charts_of(names)]


def _write(title: str, names: Sequence[str], histories: Sequence[tuple[str, History]], folder: Path, kind: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, history in histories:
        for name in (name for name in names if name in history.curves):
            curve = history.curves[name]
            steps = history.places(np.asarray(curve.rows))["step"]
            label = name if len(histories) == 1 else run if len(names) == 1 else f"{run} · {name}"
            few = len(steps) < 30
            axes.plot(steps, np.asarray(curve.values), label=label, marker="." if few else None, linewidth=1.4)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    file = folder / f"{re.sub(r'[^a-z0-9]+', '_', title.lower())}.{kind}"
    figure.savefig(file, dpi=200)
    return file
