"""Tests of the history as JSON lines."""

import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.callbacks.loops import folder_of, go_through, running
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import JsonlLog
from trainer_lib.events import Dispatcher, Modifier, Run, RunState
from trainer_lib.runs.run_history import History


def strict(text: str) -> Any:
    """Parse strict JSON, without NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def entries(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what was logged and evaluated, without what is another number each time."""
    logged = [entry for entry in entries(path) if entry["event"] in ("log", "evaluation")]
    return [{name: value for name, value in entry.items() if name not in ("time", "host_memory")} for entry in logged]


def test_each_log_and_each_evaluation_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    run = running(steps_per_epoch=4, seconds=1.23456)
    go_through([JsonlLog(str(path))], 4, run, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    assert lines(path) == [
        {"event": "log", "step": 2, "epoch": 0.5, "samples": 8, "seconds": 1.235, "loss": 0.5},
        {"event": "log", "step": 4, "epoch": 1.0, "samples": 16, "seconds": 1.235, "loss": 0.25},
        {"event": "evaluation", "step": 4, "epoch": 1.0, "samples": 16, "seconds": 1.235, "eval_loss": 0.5},
    ]
    assert [entry["event"] for entry in entries(path)] == ["started", "log", "log", "evaluation", "ended"]
    first, second = entries(path)[1:3]
    assert list(first)[:6] == ["event", "step", "epoch", "samples", "seconds", "time"]
    assert first["time"] <= second["time"] <= time.time() + 1e-3
    assert first["host_memory"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)


def test_a_value_with_the_name_of_a_field_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = running(steps_per_epoch=4)
    log = JsonlLog(tmp_path / "history.jsonl")
    for _ in range(2):
        log.on_log(run, {"time": 5.0, "loss": 1.0})
    assert caplog.text.count("The value 'time' that you log is not in history.jsonl") == 1
    assert all(entry["time"] > 5.0 for entry in entries(log.path))


def test_lines_are_written_immediately_with_their_progress(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log")
    log.on_log(running(step=3), {"loss": 1.0, "step": 99.0})
    place = {"event": "log", "step": 3, "epoch": 0.0, "samples": 0, "seconds": 0.0}
    assert lines(tmp_path / "log") == [{**place, "loss": 1.0}]


def test_nan_and_inf_are_written_as_text(tmp_path: Path) -> None:
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
    for name in ("event", "step", "epoch", "samples", "seconds"):
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


def test_an_error_that_utf_8_lacks_is_in_history_and_report(tmp_path: Path) -> None:
    class Fails(Modifier):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 3:
                raise FileNotFoundError(os.fsdecode(b"caf\xe9.png"))  # a file name in Latin-1

    with pytest.raises(FileNotFoundError):
        trainer(arguments(output_dir=tmp_path), callbacks=[Fails()]).fit()
    history = folder_of(tmp_path) / "history.jsonl"
    *_, ended = entries(history)
    assert (ended["event"], ended["reason"]) == ("ended", "FileNotFoundError: caf\udce9.png")
    assert "caf\\udce9.png" in (folder_of(tmp_path) / "report.html").read_text()
    JsonlLog(history).on_fit_begin(Run(state=RunState(step=3)))  # a resumed run writes all lines again
    assert ended in entries(history)


def test_a_resumed_run_removes_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 6, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    whole = lines(path)
    with path.open("a") as file:
        file.write('{"event": "log", "st')  # cut short by a kill
    go_through([JsonlLog(path)], 6, running(step=4, samples=16), log_every=2, evaluations={4: {"eval_loss": 0.5}})
    assert lines(path) == whole
    assert sorted(tmp_path.iterdir()) == [path]
    with path.open("a") as file:
        file.write("5\n[]\n{}\n\n")
    go_through([JsonlLog(path)], 4, running(step=4))
    assert [line["step"] for line in lines(path)] == [2, 4, 4]


def test_a_resumed_run_keeps_lines_with_line_separators_and_removes_those_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = JsonlLog(path)
    go_through([log], 2, log_every=2)
    log.on_event(running(step=2), "sample", {"text": "one\u2028two\x85three"})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "log", "step": 2, "note": "\xff"}\n\x00\xfe\n')
    go_through([JsonlLog(path)], 4, running(step=2))
    parsed = [json.loads(line) for line in path.read_bytes().splitlines()]  # at line feeds alone, of bytes
    assert [entry.get("text") for entry in parsed if entry["event"] == "sample"] == ["one\u2028two\x85three"]


def test_lines_that_a_full_disk_does_not_take_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log, limits = JsonlLog(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    log.on_log(running(step=1), {"loss": 1.0})
    whole = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        for step in (2, 3):
            log.on_log(running(step=step), {"loss": 2.0})
        assert path.read_bytes() == whole, "no line is cut"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.on_log(running(step=4), {"loss": 4.0})
    history = History(path).read()
    assert history.places(history.curves["loss"].rows)["step"].tolist() == [1, 2, 3, 4]
    (warning,) = caplog.messages
    assert warning == f"{path} cannot be written: File too large. Its lines wait until it can."


def test_how_each_process_ended_stays_in_the_history(tmp_path: Path) -> None:
    path = tmp_path / "log"
    stopped = go_through([JsonlLog(path)], 4, log_every=2)
    log, run = JsonlLog(path), running(step=2)  # resumed, and killed at step 8
    log.on_fit_begin(run)
    run.state.step = 8
    log.on_log(run, {"loss": 0.5})
    go_through([JsonlLog(path)], 4, running(step=2), log_every=2)
    events = [(entry["event"], entry["step"]) for entry in entries(path)]
    assert events == [
        ("started", 0),
        ("log", 2),
        ("ended", 4),
        ("resumed", 2),
        ("died", 8),
        ("resumed", 2),
        ("log", 4),
        ("ended", 4),
    ]
    assert [entry["steps_lost"] for entry in entries(path) if entry["event"] == "resumed"] == [2, 6]
    assert entries(path)[2]["status"] == stopped.state.status == "finished"


def test_a_rewound_run_logs_repeated_steps_once(tmp_path: Path) -> None:
    log, run = JsonlLog(tmp_path / "log"), running()
    log.on_fit_begin(run)
    for step in (2, 4, 6):
        run.state.step = step
        log.on_log(run, {"loss": 1.0})
    log.on_event(run, "went_back", {"why": "nan"})
    run.state.step = 4
    log.on_load_end(run, tmp_path)
    run.state.step = 6
    log.on_log(run, {"loss": 0.5})
    log.on_fit_end(run)
    log.on_load_end(run, tmp_path)  # the best one, in the end
    events = [(entry["event"], entry["step"]) for entry in entries(tmp_path / "log")]
    assert events == [("started", 0), ("log", 2), ("log", 4), ("went_back", 6), ("log", 6), ("ended", 6)]


def test_other_events_are_lines_too(tmp_path: Path) -> None:
    log, run = JsonlLog(tmp_path / "log", skipped_steps=True), running(step=7, samples=28)
    events = Dispatcher([log])
    run.trainer = SimpleNamespace(events=events)
    events.fire("on_fit_begin", run)
    run.record_event("rewound", to=3, loss=float("inf"))
    events.fire("on_step_skipped", run)
    events.fire("on_best", run, "eval_loss", 0.25)
    folder = tmp_path / "checkpoint-7"
    place = {"step": 7, "epoch": 0.5, "samples": 28, "seconds": 1.0}
    run.state.checkpoints = [{"path": str(folder), **place, "reasons": ["best"]}]
    run.state.step, run.state.samples = 9, 36  # in the background
    run.state.save_seconds = 0.12345
    events.fire("on_save_end", run, folder)
    run.state.status = "failed"
    events.fire("on_exception", run, ValueError("no such thing"))
    events.fire("on_fit_end", run)
    begun, *lines = entries(tmp_path / "log")
    assert begun["torch"] == torch.__version__
    assert (begun["event"], begun["processes"], begun["steps_lost"]) == ("resumed", 1, 0)
    for entry in lines:
        del entry["time"]
    now = {"step": 9, "epoch": 0.0, "samples": 36, "seconds": 0.0}
    then = {"step": 7, "epoch": 0.0, "samples": 28, "seconds": 0.0}
    assert lines == [
        {"event": "rewound", **then, "to": 3, "loss": "Infinity"},
        {"event": "skipped", **then, "step": 8, "why": "the gradients overflowed"},
        {"event": "best", **then, "metric": "eval_loss", "value": 0.25},
        {"event": "save", **place, "path": str(folder), "why": ["best"], "took": 0.123},
        {
            "event": "ended",
            **now,
            "status": "failed",
            "reason": "ValueError: no such thing",
            "traceback": "ValueError: no such thing\n",
        },
    ]
    assert not Dispatcher([JsonlLog(tmp_path / "log")]).listens("on_step_skipped")  # costs a look in each step


def test_a_cut_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 6, log_every=2)
    whole = path.read_text()

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    log, run = JsonlLog(path), running(step=4)
    with monkeypatch.context() as patches:
        patches.setattr("os.fsync", fail)
        log.on_fit_begin(run)
        log.on_log(run, {"loss": 0.25})
    assert path.read_text() == whole
    assert sorted(tmp_path.iterdir()) == [path]
    assert caplog.messages == [f"{path} cannot be written: no space left. Its lines wait until it can."]
    run.state.step = 6
    log.on_log(run, {"loss": 0.125})
    events = [(line["event"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
    assert [event for event in events if event[0] != "ended"] == [
        ("started", 0),
        ("log", 2),
        ("log", 4),
        ("resumed", 4),
        ("log", 4),
        ("log", 6),
    ]


def test_a_new_run_puts_an_older_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    go_through([JsonlLog(path)], 2, log_every=1)
    first = path.read_text()
    go_through([JsonlLog(path)], 3, log_every=3)
    assert [line["step"] for line in lines(path)] == [3]
    assert (tmp_path / "log.old").read_text() == first


def test_a_resumed_run_without_a_file_starts_one(tmp_path: Path) -> None:
    go_through([JsonlLog(tmp_path / "log")], 4, running(step=2), log_every=1)
    assert [line["step"] for line in lines(tmp_path / "log")] == [3, 4]


def test_the_main_process_alone_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log"

    def body() -> None:
        run = running()
        run.accelerator = Accelerator(cpu=True)
        rank_path = path if run.is_main_process else path.with_name("other") / "log"
        go_through([JsonlLog(rank_path)], 3, run, log_every=1, evaluations={3: {"eval_loss": 0.5}})

    run_world(body, timeout=60)
    assert len(lines(path)) == 4
    assert entries(path)[0]["processes"] == 2
    assert list(path.parent.iterdir()) == [path]
