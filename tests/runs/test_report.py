"""Tests of the report's data and of writing it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.runs.histories import line, make_run, training
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.runs.report.report_data import contents
from trainer_lib.runs.report.report_page import find_runs, write_report
from trainer_lib.runs.report.timeline_marks import marks


class Elements(HTMLParser):
    """The elements of a page, with the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script" and data.strip():
            self.scripts[-1] += data


def report_data(*folders: Path) -> dict[str, Any]:
    return contents(find_runs(folders))


def test_a_run_is_reported_with_all_events(tmp_path: Path) -> None:
    report = report_data(make_run(tmp_path / "one"))
    assert [chart["id"] for chart in report["charts"]] == [
        "loss",
        "metric:accuracy",
        "learning-rate",
        "gradient-norm",
        "samples",
        "data-wait",
        "memory",
    ]
    assert report["charts"][0]["names"] == ["loss", "eval_loss"]
    (run,) = report["runs"]
    assert (run["name"], run["status"]) == ("one", "finished")
    figures = dict(run["figures"])
    assert figures["Steps"] == "100"
    assert figures["Best eval_accuracy"] == "1 at step 50"
    assert figures["Time of training"] == "50 s"
    assert figures["Memory, most"] == "1.0 GB"
    loss = run["curves"]["loss"]
    assert (loss["count"], len(loss["values"]), loss["broken"]) == (100, 100, 0)
    places = run["places"][loss["at"]]
    assert (places["step"][9], places["seconds"][9], places["samples"][9]) == (10, 5, 80)
    assert run["places"][run["curves"]["eval_loss"]["at"]]["step"] == [25, 50, 75, 100]
    assert [(mark["kind"], mark["title"], mark["step"]) for mark in run["marks"]] == [
        ("start", "started", 0),
        ("best", "best so far", 25),
        ("best", "best so far", 50),
        ("save", "saved", 50),
        ("fail", "died", 60),
        ("resume", "resumed", 50),
        ("end", "finished", 100),
    ]
    assert "10 steps repeated" in run["marks"][5]["text"]
    assert run["marks"][0]["text"] == "2 processes on cpu, bf16, torch 2.13"
    (save,) = run["checkpoints"]
    assert (save["name"], save["why"], save["is_best"]) == ("checkpoint-00000050", "best, interval", True)
    assert save["is_there"] is False
    assert [row["is_best"] for row in run["evaluations"]["rows"]] == [False, True, False, False]
    assert run["evaluations"]["columns"] == ["eval_loss", "eval_accuracy"]
    assert run["arguments"] == {"learning_rate": "0.1", "max_steps": "100", "fsdp.offload": "True"}
    assert run["environment"]["memory"] == "16.0 GB"


def test_a_page_needs_nothing_else_and_runs_no_text(tmp_path: Path) -> None:
    bad = "</script><script>window.harm=1</script><img src=x onerror=window.harm=1>&amp;{{data}}\u2028"
    lines = [*training(), line("<b>" + bad, 100, why=bad), line("log", 101, **{bad: 1.0})]
    facts = {"status": "failed", "state": {"reason": bad}, "arguments": {bad: bad}, "environment": {"host": bad}}
    (run,) = find_runs([make_run(tmp_path / "one", lines, facts)])
    run.name = bad
    text = write_report([run], tmp_path / "report.html").read_text("utf-8")
    page = Elements(text)
    data, script = page.scripts
    assert json.loads(data)["runs"][0]["name"] == bad
    assert [tag for tag, _ in page.found if tag in ("img", "b", "iframe", "object", "embed", "base", "form")] == []
    assert [attrs for tag, attrs in page.found if tag in ("script", "link") and ("src" in attrs or tag == "link")] == [
        {"rel": "icon", "href": "data:,"}
    ]
    assert re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"http://www\.w3\.org/2000/svg", "", script)) == []
    assert "innerHTML" not in script
    (policy,) = [attrs["content"] for _, attrs in page.found if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "connect-src 'none'" in policy


def test_a_long_run_keeps_its_extremes(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    count = 50_000  # and as many other values: what takes time is reading JSON
    with (folder / "history.jsonl").open("w") as file:
        for step in range(1, count + 1):
            loss = {12_345: 99.0, 23_456: -99.0, 34_567: '"NaN"'}.get(step, 1.0)
            file.write(f'{{"event": "log", "step": {step}, "samples": {step}, "seconds": 1, "loss": {loss}}}\n')
    (run,) = report_data(folder)["runs"]
    curve = run["curves"]["loss"]
    assert (curve["count"], curve["broken"]) == (count, 1)
    assert len(curve["values"]) <= 1500
    at = dict(zip(run["places"][curve["at"]]["step"], curve["values"], strict=True))
    assert (at[12_345], at[23_456], at[34_567]) == (99, -99, None)
    assert 200 < len(curve["means"]["values"]) <= 300
    assert max(curve["means"]["values"]) < 2  # one outlier of 167


def test_which_runs_are_found(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "other")
    file = tmp_path / "alone.jsonl"
    file.write_text((first / "history.jsonl").read_text())
    assert [run.name for run in find_runs([tmp_path / "runs"])] == ["one", "other"]
    assert [run.name for run in find_runs([second, first, file, first])] == ["other", "one", "alone"]
    twin = make_run(tmp_path / "elsewhere" / "one")
    assert [run.name for run in find_runs([first, twin])] == [str(first), str(twin)]
    make_run(tmp_path / "elsewhere" / "of" / "a" / "day")
    make_run(tmp_path / "elsewhere" / "too" / "deep" / "to" / "be" / "found")
    make_run(first / "checkpoints" / "no run")
    assert [run.name for run in find_runs([tmp_path / "elsewhere"])] == ["day", "one"]
    assert [run.name for run in find_runs([tmp_path])] == [
        str(run) for run in (tmp_path / "elsewhere" / "of" / "a" / "day", twin, first, second)
    ]
    with pytest.raises(ConfigurationError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"has no run: no run.json or history.jsonl. Give the folder of a run"):
        find_runs([tmp_path / "empty"])
    for number in range(24):
        make_run(tmp_path / "runs" / f"more-{number}", [])
    with pytest.raises(ConfigurationError, match=r"compares at most 24 runs \(got 26\)"):
        find_runs([tmp_path / "runs"])


def test_a_run_without_its_file_or_history_is_reported_partially(tmp_path: Path) -> None:
    left, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    (left / "run.json").write_text("{ no JSON")
    (other / "history.jsonl").unlink()
    first, second = report_data(left, other)["runs"]
    assert (first["status"], first["arguments"]) == ("finished", {})
    assert (second["status"], second["curves"], second["arguments"]["max_steps"]) == ("finished", {}, "100")


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_report(find_runs([make_run(tmp_path / "one")]), tmp_path / "new" / "report.html")
    before = file.read_text()

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_report(find_runs([tmp_path / "one"]), file)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_long_events_are_shortened() -> None:
    (mark,) = marks([{"event": "histograms", "step": 5, "of_step": 4, "counts": list(range(1000))}])
    assert (mark["kind"], mark["title"], mark["step"]) == ("note", "histograms", 5)
    assert mark["text"].startswith("of_step 4; counts 0, 1, 2, ")
    assert mark["text"].endswith(" …")
    assert len(mark["text"]) == 402
