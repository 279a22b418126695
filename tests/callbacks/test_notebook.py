"""Tests of NotebookChart in a real notebook."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.callbacks.loops import go_through, running
from trainer_lib import TrainingArguments
from trainer_lib.callbacks import NotebookChart, Printer, ProgressBar
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer import defaults

CELL = """
from tests.callbacks.loops import go_through
from trainer_lib.callbacks import NotebookChart
metrics = {2: {"eval_loss": 0.5, "eval_accuracy": 0.75}}
go_through([NotebookChart(seconds=0)], 4, log_every=1, evaluations=metrics)
None
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore")  # of the client, whose kernel is another process
def test_a_notebook_draws_again_in_place() -> None:
    cells = [nbformat.v4.new_code_cell(CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs  # one, however often it was drawn
    text = output["data"]["text/html"]
    assert [re.sub("<.*?>", "", part) for part in re.findall(r"<svg.*?</text>", text)] == ["Loss", "Accuracy"]
    assert "step 4, epoch 0: loss 0.25 (finished)" in text
    assert text.count("<path") == 2 * 5 + 3


def test_outside_a_notebook_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"works only in a notebook, .* Use ProgressBar"):
        NotebookChart().on_fit_begin(running())


def test_a_resumed_run_keeps_the_earlier_curves() -> None:
    chart, run = NotebookChart(), running(step=2)
    run.state.history = [{"step": 1, "epoch": 0.5, "loss": 4.0}, {"step": 2, "epoch": 1.0, "<b>": float("nan")}]
    chart._handle = None
    with pytest.raises(ConfigurationError):
        chart.on_fit_begin(run)
    go_through([], 2, run)
    chart.on_log(run, {"loss": 2.0})
    text = chart.picture()
    assert "loss 2" in text
    assert "<b>" not in text
    (path,) = re.findall(r'<path d="(M[^"]*L[^"]*)" fill="none"', text)
    assert path.count("L") == 1


def test_charts_take_the_place_of_lines() -> None:
    """A run prints lines where it shows no bar, unless a callback shows the run already."""
    for shows_bar, given, displays in (
        (False, [], [Printer]),
        (False, [NotebookChart()], [NotebookChart]),
        (False, [NotebookChart(), Printer()], [NotebookChart, Printer]),
        (True, [NotebookChart()], [ProgressBar, NotebookChart]),
    ):
        callbacks = defaults.callbacks(TrainingArguments(progress_bar=shows_bar), given)
        assert [type(callback) for callback in callbacks if callback.is_display] == displays
