"""The commands `trainer-lib runs` and `trainer-lib report`."""

import json
import os
import pty
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.runs.histories import line, make_run
from trainer_lib.commands.main import main
from trainer_lib.runs.report.live_report import LiveReport
from trainer_lib.runs.report.report_page import find_runs


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", [line("started", 0, max_steps=9), line("log", 3, loss="NaN")], {"status": "failed"})
    assert main(["runs", str(tmp_path)]) == 0
    rows = {row.split()[0]: row.split() for row in capsys.readouterr().out.splitlines()}
    assert rows["run"] == ["run", "state", "step", "loss", "best", "time"]
    assert rows["one"] == ["one", "finished", "100", "0.03567", "eval_accuracy", "1", "at", "50", "50", "s"]
    assert rows["two"] == ["two", "failed", "3/9", "nan", "1.5", "s"]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = {run["path"]: run for run in json.loads(capsys.readouterr().out)}
    assert listed[str(tmp_path / "one")]["best"] == {"metric": "eval_accuracy", "value": 1.0, "step": 50}
    assert listed[str(tmp_path / "two")]["losses"] == []


def test_what_is_no_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "There are no runs in" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == f"There are no runs in {tmp_path}.\n"
    assert main(["report", "."]) == 2
    assert f"error: {tmp_path} has no run: no run.json" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["runs", str(tmp_path), "--watch"]) == 2
    assert "--watch needs a terminal" in capsys.readouterr().err
    assert main(["runs", "--wach"]) == 2
    assert "unrecognized arguments: --wach" in capsys.readouterr().err


def test_runs_are_watched_in_a_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    pid, terminal = pty.fork()
    if pid == 0:
        _watch(tmp_path)
    seen = b""
    while b"finished" not in seen:
        seen += os.read(terminal, 1 << 16)
    os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert seen.startswith(b"\x1b[H\x1b[2J")
    assert "█▇▆▄▄▃▃▂▂▂▂▁▁▁▁▁" in seen.decode()


def _watch(folder: Path) -> None:
    """Run the command in a fork of this process, which a terminal of its own belongs to."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        os.environ["COLUMNS"] = "100"
        code = main(["runs", str(folder), "--watch"])
        sys.stdout.flush()
    finally:
        os._exit(code)


def test_a_report_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    first, _ = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "two")
    assert main(["report", str(first), "--open"]) == 0
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    assert opened == [(first / "report.html").as_uri()]
    assert main(["report", "runs"]) == 0
    assert "2 runs compared" not in (first / "report.html").read_text()
    assert '"name":"two"' in (tmp_path / "report.html").read_text()
    assert main(["report", str(first / "history.jsonl"), "--output", "deep/file.html"]) == 0
    assert '"name":"history"' in (tmp_path / "deep" / "file.html").read_text()
    assert main(["report", "nowhere"]) == 2
    assert main(["report"]) == 2
    assert main(["report", "runs", "--port", "1"]) == 2
    assert main(["report", "runs", "--live", "--output", "x"]) == 2
    assert main(["report", "runs", "--live", "--port", "99999"]) == 2
    errors = capsys.readouterr().err
    for message in (
        "does not exist",
        "RUN",
        "Add --live",
        "Leave out --output",
        "--port 99999 cannot be used: ports are numbers from 0 to 65535. Leave",
    ):
        assert message in errors


def test_charts_and_the_page_of_all_runs_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "two")
    assert main(["report", str(first), "--charts", str(tmp_path / "charts")]) == 0
    files = [Path(file) for file in capsys.readouterr().out.splitlines()]
    assert files[:2] == [tmp_path / "charts" / "loss.svg", tmp_path / "charts" / "accuracy.svg"]
    assert len(files) == 7
    assert all(ElementTree.parse(file).getroot().tag.endswith("svg") for file in files)
    assert main(["report", str(tmp_path / "runs"), "--charts", str(tmp_path / "charts"), "--format", "png"]) == 0
    with Image.open(tmp_path / "charts" / "loss.png") as picture:
        assert picture.size == (1200, 720)
    assert main(["runs", str(tmp_path / "runs"), "--html", str(tmp_path / "all.html")]) == 0
    assert '"name":"two"' in (tmp_path / "all.html").read_text()
    runs = ["runs", str(tmp_path / "runs")]
    assert main([*runs, "--port", "1"]) == main([*runs, "--live", "--watch"]) == main([*runs, "--open"]) == 2
    assert main(["report", str(first), "--charts", "x", "--live"]) == 2
    errors = capsys.readouterr().err
    for message in ("Add --live", "Leave out --watch", "Leave out --live and --output"):
        assert message in errors


def test_a_live_report_tells_more_as_there_is_more(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", [line("log", 1, loss=1.0)])
    live = LiveReport(find_runs([folder]))
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        assert b'"live":true' in urllib.request.urlopen(live.url, timeout=10).read()
        with (folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(line("log", 2, loss=0.5)) + "\n")
        with urllib.request.urlopen(f"{live.url}data.json", timeout=10) as answer:
            (run,) = json.load(answer)["runs"]
        assert run["curves"]["loss"]["values"] == [1, 0.5]
        from_elsewhere = urllib.request.Request(live.url, headers={"Host": "evil.example:80"})  # it calls itself ours
        for request, code in ((f"{live.url}../etc/passwd", 404), (from_elsewhere, 403)):
            with pytest.raises(urllib.error.HTTPError, match=str(code)) as refused:
                urllib.request.urlopen(request, timeout=10)
            refused.value.close()
    finally:
        live.close()
        thread.join()
