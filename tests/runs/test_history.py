"""Tests of reading a history that grows or was truncated."""

import json
import math
import os
from pathlib import Path
from typing import Any

from tests.callbacks.loops import go_through, running
from tests.runs.histories import line
from trainer_lib.callbacks import JsonlLog
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.run_history import History


def append(file: Path, *lines: Any) -> None:
    with file.open("a") as opened:
        opened.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def test_the_callback_s_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    values = {1: math.nan, 2: math.inf, 3: 0.25}
    go_through([JsonlLog(file)], 3, log_every=1, loss=lambda step: values[step], evaluations={2: {"eval_loss": 0.5}})
    history = History(file).read()
    assert [event["event"] for event in history.events] == ["started", "ended"]
    loss = history.curves["loss"]
    assert [str(value) for value in loss.values] == ["nan", "inf", "0.25"]
    assert history.places(list(loss.rows))["samples"].tolist() == [4, 8, 12]
    assert history.places(list(history.curves["eval_loss"].rows))["step"].tolist() == [2]
    assert set(history.curves) == {"loss", "eval_loss", "host_memory"}


def test_a_history_is_read_on_as_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    history = History(file)
    assert history.read().curves == {}
    append(file, line("log", 1, loss=1.0, name="no number", flag=True), '{"event": "log", "st')
    assert list(history.read().curves["loss"].values) == [1.0]
    assert set(history.curves) == {"loss", "flag"}
    append(file, 'ep": 2, "loss": 0.5}\n', "nothing of ours\n", "[]\n", line("save", 2))
    assert list(history.read().curves["loss"].values) == [1.0, 0.5]
    assert history.events == [line("save", 2)]
    assert history.last == line("save", 2)


def test_a_truncated_history_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, *(line("log", step, loss=float(step)) for step in range(1, 9)))
    history = History(file).read()
    log = JsonlLog(file)
    log.on_fit_begin(running(step=3))  # resumed, in a new file of this name
    assert list(history.read().curves["loss"].values) == [1.0, 2.0, 3.0]
    text = file.read_text()
    os.truncate(file, 0)
    append(file, text.splitlines()[0] + "\n")
    assert list(history.read().curves["loss"].values) == [1.0]


def test_evaluations_beside_a_run_are_read_with_it_in_the_order_of_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def add(name: str, *steps: int) -> None:
        with (folder / name).open("a") as file:
            file.writelines(
                json.dumps({"event": "evaluation", "step": step, "eval_loss": step / 2}) + "\n" for step in steps
            )

    add("history.jsonl", 10, 20)
    add("evaluations.jsonl", 5, 15)
    source = Source.of(folder)
    (run,) = contents([source])["runs"]
    assert [row["step"] for row in run["evaluations"]["rows"]] == [5, 10, 15, 20]
    assert run["curves"]["eval_loss"]["values"] == [2.5, 5, 7.5, 10]
    assert source.history.last["step"] == 20, "how far the run itself is"
    add("evaluations.jsonl", 25)  # while it is watched
    (run,) = contents([source])["runs"]
    assert run["curves"]["eval_loss"]["values"][-1] == 12.5
    (folder / "evaluations.jsonl").unlink()
    add("evaluations.jsonl", 5)
    (run,) = contents([source])["runs"]
    assert run["curves"]["eval_loss"]["values"] == [2.5, 5, 10]
