"""This file is the tests of the log in lines of JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.callbacks.loops import go_through, running
from trainer_lib import Accelerator
from trainer_lib.callbacks import JsonlLog
from trainer_lib.launchers import run_forked


def strict(text: str) -> Any:
    """Read JSON as others do, to whom NaN is none."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def test_each_log_and_each_evaluation_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    run = running(steps_per_epoch=4, seconds=1.23456)
    go_through([JsonlLog(str(path))], 4, run, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    assert lines(path) == [
        {"event": "log", "step": 2, "epoch": 0.5, "seconds": 1.235, "loss": 0.5},
        {"event": "log", "step": 4, "epoch": 1.0, "seconds": 1.235, "loss": 0.25},
        {"event": "evaluation", "step": 4, "epoch": 1.0, "seconds": 1.235, "eval_loss": 0.5},
    ]
    assert list(lines(path)[0]) == ["event", "step", "epoch", "seconds", "loss"]


def test_a_line_is_there_at_once_and_where_it_is_counts(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log")
    log.on_log(running(step=3), {"loss": 1.0, "step": 99.0})
    assert lines(tmp_path / "log") == [{"event": "log", "step": 3, "epoch": 0.0, "seconds": 0.0, "loss": 1.0}]


def test_what_json_has_no_number_for_is_text(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "nan": float("nan"),
        "more": float("inf"),
        "less": float("-inf"),
        "tensor": torch.tensor(2.5),
        "one": torch.tensor([3]),
        "numpy": np.float32(0.5),
        "lost": np.float64("nan"),
        "count": 3,
        "yes": True,
        "none": None,
        "text": "Grüße",
        "list": [1.0, float("nan")],
        "inner": {1: np.int64(2)},
        "many": torch.zeros(2),
        "other": Path("x"),
    }
    JsonlLog(tmp_path / "log").on_log(running(), values)
    [line] = lines(tmp_path / "log")
    for name in ("event", "step", "epoch", "seconds"):
        del line[name]
    assert line == {
        "nan": "NaN",
        "more": "Infinity",
        "less": "-Infinity",
        "tensor": 2.5,
        "one": 3,
        "numpy": 0.5,
        "lost": "NaN",
        "count": 3,
        "yes": True,
        "none": None,
        "text": "Grüße",
        "list": [1.0, "NaN"],
        "inner": {"1": 2},
        "many": "tensor([0., 0.])",
        "other": "x",
    }
    assert float(line["less"]) == float("-inf")


def test_a_resumed_run_takes_out_what_came_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 6, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    whole = path.read_text()
    path.write_text(whole + '{"event": "log", "st')  # cut short by a kill
    go_through([JsonlLog(path)], 6, running(step=4), log_every=2, evaluations={4: {"eval_loss": 0.5}})
    assert path.read_text() == whole
    assert sorted(tmp_path.iterdir()) == [path]
    path.write_text(whole + "5\n[]\n{}\n\n")
    go_through([JsonlLog(path)], 4, running(step=4))
    assert [line["step"] for line in lines(path)] == [2, 4, 4]


def test_a_cut_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 6, log_every=2)
    whole = path.read_text()

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        JsonlLog(path).on_fit_begin(running(step=4))
    assert path.read_text() == whole
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_new_run_puts_an_older_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 2, log_every=1)
    first = path.read_text()
    go_through([JsonlLog(path)], 3, log_every=3)
    assert [line["step"] for line in lines(path)] == [3]
    assert (tmp_path / "log.old").read_text() == first


def test_a_resumed_run_without_a_file_begins_one(tmp_path: Path) -> None:
    go_through([JsonlLog(tmp_path / "log")], 4, running(step=2), log_every=1)
    assert [line["step"] for line in lines(tmp_path / "log")] == [3, 4]


def test_the_main_process_alone_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log"

    def body() -> None:
        run = running()
        run.accelerator = Accelerator(cpu=True)
        own = path if run.is_main_process else path.with_name("other") / "log"
        go_through([JsonlLog(own)], 3, run, log_every=1, evaluations={3: {"eval_loss": 0.5}})

    run_forked(body, timeout=60)
    assert len(lines(path)) == 4
    assert list(path.parent.iterdir()) == [path]
