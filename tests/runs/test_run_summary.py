"""Tests of the list of runs, also with long histories."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs.histories import BEGUN, line, make_run, training
from trainer_lib.commands.main import main
from trainer_lib.filesystem.remote_paths import path_at
from trainer_lib.launchers import run_forked
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.report.sparkline import shows_sparklines, sparkline
from trainer_lib.runs.run_environment import describe_process
from trainer_lib.runs.run_summary import list_runs, summarize_run


def unended(status: str = "running", **facts: Any) -> dict[str, Any]:
    return {"status": status, "created": BEGUN, **facts}


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    summary = summarize_run(folder)
    assert (summary.status, summary.step, summary.max_steps, summary.seconds) == ("finished", 100, None, 50.0)
    assert summary.best == {"metric": "eval_accuracy", "value": 1.0, "step": 50}
    assert 50 < len(summary.losses) <= 61
    assert summary.losses[0] == pytest.approx(0.9672161)
    assert summary.losses[-1] == pytest.approx(0.0356740)
    assert summary.checkpoint is None  # it is gone
    checkpoint = tmp_path / "checkpoint-00000100"
    checkpoint.mkdir()
    with (folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(line("save", 100, path=str(checkpoint))) + '\n{"event": "log", "step": 7, "lo')
    summary = summarize_run(folder)
    assert (summary.checkpoint, summary.saved, summary.step) == (str(checkpoint), BEGUN + 100, 100)


def test_checkpoints_of_a_run_that_was_moved_are_found(tmp_path: Path) -> None:
    names = ["checkpoint-00000050", "checkpoint-00000100"]
    paths = [str(tmp_path / "before" / "checkpoints" / name) for name in names]
    lines = [line("save", step, path=path, why=["interval"]) for step, path in zip((50, 100), paths, strict=True)]
    folder = make_run(tmp_path / "before", [*training(), *lines])
    (tmp_path / "before" / "checkpoints" / names[1]).mkdir(parents=True)  # the other one was deleted
    folder = folder.rename(tmp_path / "after")
    moved = folder / "checkpoints" / names[1]
    assert summarize_run(folder).checkpoint == str(moved)
    [run] = contents([Source.of(folder)])["runs"]
    shown = [(entry["name"], entry["path"], entry["is_there"]) for entry in run["checkpoints"]]
    assert shown[-2:] == [(names[0], paths[0], False), (names[1], str(moved), True)]


def test_a_killed_run_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    lines = [line("started", 0, max_steps=100), {**line("log", 10, loss=1.0), "time": time.time()}]
    host, _ = run_forked(describe_process, timeout=60)
    alive = make_run(tmp_path / "alive", lines, unended(process=describe_process()))
    dead = make_run(tmp_path / "dead", lines, unended(process=host))
    reborn = make_run(tmp_path / "reborn", lines, unended(process={**describe_process(), "began": 1.0}))
    before_boot = make_run(tmp_path / "boot", lines, unended(process={**describe_process(), "boot": "another"}))
    far = make_run(tmp_path / "far", lines, unended(process={**describe_process(), "host": "elsewhere"}))
    states = [summarize_run(folder).status for folder in (alive, dead, reborn, before_boot, far)]
    assert states == ["running", "died", "died", "died", "running"]
    with (far / "history.jsonl").open("a") as file:
        file.write(json.dumps({**line("log", 11), "time": time.time() - 700}) + "\n")
    assert summarize_run(far).status == "silent"
    interrupted = make_run(tmp_path / "interrupted", lines, unended("interrupted", process=host))
    assert summarize_run(interrupted).status == "interrupted"


def test_runs_are_found_in_folders_and_subfolders(tmp_path: Path) -> None:
    make_run(tmp_path / "b", [], {"created": 2.0})
    make_run(tmp_path / "deep" / "in" / "a" / "folder" / "a", [], {"created": 0.0})
    make_run(tmp_path / "deep" / "in" / "a" / "a", [], {"created": 1.0})
    make_run(tmp_path / "c", [line("log", 1, loss="NaN")], {"created": 3.0})
    (tmp_path / "no run").mkdir()
    assert [run.path.name for run in list_runs(tmp_path)] == ["a", "b", "c"]
    assert [run.path.name for run in list_runs(tmp_path / "b")] == ["b"]
    assert list_runs(tmp_path / "no run") == []


def test_a_long_history_is_not_read_completely(tmp_path: Path) -> None:
    text = "".join(f'{{"event": "log", "step": {step}, "loss": {step}}}\n' for step in range(1, 200_001))
    folder = make_run(tmp_path / "long", [])
    (folder / "history.jsonl").write_text(text)
    summary, seconds = summarize_run(folder), list[float]()
    for _ in range(3):
        began = time.process_time()
        summarize_run(folder)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1
    assert (summary.step, summary.losses[-1]) == (200_000, 200_000.0)
    assert summary.losses == sorted(summary.losses)


def test_runs_behind_a_url_are_seen_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "one")
    url = f"memory://{tmp_path.name}/runs"
    for name in ("history.jsonl", "run.json"):
        (path_at(url) / "far" / name).write_bytes((folder / name).read_bytes())
    assert main(["runs", url]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("far  finished  100   0.03567")
    assert main(["report", url, "--output", str(tmp_path / "report.html")]) == 0
    assert '"name":"far"' in (tmp_path / "report.html").read_text()
    assert main(["report", url, "--live"]) == 2
    assert "behind a URL" in capsys.readouterr().err


def test_a_history_without_read_permission_hides_no_run() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        make_run(Path(folder, "open"))
        (make_run(Path(folder, "closed")) / "history.jsonl").chmod(0)
        user = os.geteuid()
        if user == 0:  # who may read everything
            os.seteuid(65534)
        try:
            statuses = {run.path.name: run.status for run in list_runs(Path(folder))}
        finally:
            os.seteuid(user)
    assert statuses == {"open": "finished", "closed": "finished"}


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([float("nan")]) == ""
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([float(value) for value in range(8)]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert len(sparkline([1.0] * 1000, 20)) == 20
    with Path(os.devnull).open("w", encoding="ascii") as file:
        assert not shows_sparklines(file)
    main, other = os.openpty()
    with os.fdopen(other, "w", encoding="utf-8") as terminal:
        assert shows_sparklines(terminal)
    os.close(main)
