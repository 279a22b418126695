"""The `FitResult`: as a table, as a data frame, as curves."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib.events import Best, Modifier, Run, RunState
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.runs.report.report_data import contents
from trainer_lib.runs.report.report_page import find_runs
from trainer_lib.runs.run_summary import summarize_run
from trainer_lib.trainer.result import FitResult

HISTORY = [
    {"step": 2, "epoch": 0.5, "loss": 4.0},
    {"step": 2, "epoch": 0.5, "eval_loss": 5.0},
    {"step": 4, "epoch": 1.0, "loss": 2.0},
]


def result() -> FitResult:
    return FitResult(state=RunState(step=4, history=HISTORY, best=Best("eval_loss", 5.0, 2)), metrics={"loss": 2.0})


def test_a_data_frame_has_a_row_for_each_step() -> None:
    frame = result().to_pandas()
    assert frame.index.tolist() == [2, 4]
    assert list(frame.columns) == ["epoch", "loss", "eval_loss"]
    assert frame["loss"].tolist() == [4.0, 2.0]
    assert frame["eval_loss"].isna().tolist() == [False, True]
    assert len(FitResult(state=RunState()).to_pandas()) == 0


def test_curves_are_drawn_by_name() -> None:
    mpl.use("agg")
    axes = result().plot()
    assert [line.get_label() for line in axes.lines] == ["eval_loss", "loss"]
    assert axes.lines[1].get_xydata().tolist() == [[2.0, 4.0], [4.0, 2.0]]
    assert axes.get_xlabel() == "step"
    assert result().plot("eval_loss", axes=axes) is axes
    assert len(axes.lines) == 3
    with pytest.raises(ConfigurationError, match=r"Unknown curve 'los'. Known: eval_loss, loss. Did you mean 'loss'"):
        result().plot("los")
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.parametrize(("package", "verb"), [("matplotlib", "plot"), ("pandas", "to_pandas")])
def test_what_is_not_installed_is_named_with_its_extra(
    package: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"trainer_lib\[plot\]"):
        getattr(FitResult(state=RunState()), verb)()


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_a_table_has_curves_where_a_terminal_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loss" in str(result())
    assert "█" not in str(result())
    monkeypatch.setattr("sys.stdout", Terminal())
    assert "2  █▁" in str(result())


def test_a_run_has_a_report_in_its_folder(tmp_path: Path) -> None:
    result = trainer(arguments(output_dir=tmp_path), eval_dataset=points(8)).fit()
    (report,) = tmp_path.glob("*/report.html")
    assert result.report == report
    assert str(report) in str(result)
    text = report.read_text()
    assert '"status":"finished"' in text
    assert '"learning_rate"' in text
    assert trainer(arguments()).fit().report is None


def test_a_run_that_was_killed_while_it_wrote_its_report_writes_it_when_it_resumes(tmp_path: Path) -> None:
    def train(dies: bool) -> list[str]:
        def kill(event: str, details: Any) -> None:
            if event == "open" and str(details[0]).endswith(".report.html.partial"):
                os.kill(os.getpid(), signal.SIGKILL)

        if dies:
            sys.addaudithook(kill)
        trainer(arguments(output_dir=tmp_path, resume="auto", save_every=4)).fit()
        (folder,) = tmp_path.iterdir()
        return sorted(path.name for path in folder.iterdir())

    with pytest.raises(ProcessFailedError, match="SIGKILL"):
        run_forked(train, (True,), 1, timeout=60)
    assert run_forked(train, (False,), 1, timeout=60) == [["checkpoints", "history.jsonl", "report.html", "run.json"]]


class Fails(Modifier):
    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 4:
            raise RuntimeError("the fifth step")


def test_a_run_that_went_on_tells_how_it_ended_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": tmp_path, "save_every": 4, "log_every": 1, "resume": "auto"}
    with pytest.raises(RuntimeError):
        trainer(arguments(**options), callbacks=[Fails()]).fit()
    trainer(arguments(**options, warmup=2)).fit()
    (folder,) = tmp_path.iterdir()
    (run,) = contents(find_runs([folder]))["runs"]
    marks = [(mark["title"], mark["step"], mark["text"]) for mark in run["marks"]]
    process = marks[0][2]
    assert process.startswith("1 process on cpu, full precision, torch ")
    assert marks == [
        ("started", 0, process),
        ("failed", 4, "RuntimeError: the fifth step"),
        ("resumed", 4, process),
        ("changed arguments", 4, "warmup: - → 2"),
        ("saved", 8, marks[4][2]),
        ("saved", 10, marks[5][2]),
        ("finished", 10, ""),
    ]
    assert marks[5][2].startswith("checkpoint-00000010 (end) in ")
    # The first was being saved while the run failed, so no event reports it.
    saved = [(save["step"], save["why"], save["is_there"]) for save in run["checkpoints"]]
    assert saved == [(4, "interval", True), (8, "interval", True), (10, "end", True)]
    places = run["places"][run["curves"]["loss"]["at"]]
    assert places["step"] == list(range(1, 11))
    assert places["seconds"] == sorted(places["seconds"])
    assert run["arguments"]["warmup"] == "2"
    assert run["environment"]["torch"] == torch.__version__
    assert summarize_run(folder).status == "finished"


def test_a_report_that_cannot_be_written_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*message: object) -> None:
        raise ValueError("no page")

    monkeypatch.setattr("trainer_lib.runs.report.report_page.page", fail)
    result = trainer(arguments(output_dir=tmp_path)).fit()
    assert (result.status, result.report) == ("finished", None)


def test_a_notebook_shows_a_table_and_a_prompt_one_line() -> None:
    entries = [{"step": step, "epoch": 1.0, "loss": 1.0} for step in range(200)]
    state = RunState(run_id="run-<1>", step=4, history=entries, status="finished")
    fit_result = FitResult(state=state, metrics={"loss": 2.0, "eval_loss": 1 / 3})
    assert repr(fit_result) == "FitResult(run='run-<1>', status='finished', step=4, loss=2, eval_loss=0.333333)"
    assert "history" not in repr(state)
    page = fit_result._repr_html_()
    assert page.startswith("<table><tr><th")
    assert "run-&lt;1&gt;, finished" in page
    assert page.count("<tr>") == len(str(fit_result).splitlines())
