"""Tests of the report in a real browser: contents, interaction, and no network access."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.runs.browser import Browser, find_browser
from tests.runs.histories import line, make_run, training
from trainer_lib.runs.png_images import png_uri
from trainer_lib.runs.report.live_report import LiveReport, LiveRuns
from trainer_lib.runs.report.report_page import find_runs, write_report
from trainer_lib.runs.report.runs_page import write_runs_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here (Debian's: chromium)"),
]

CHART = "document.querySelector('[data-chart=\"loss\"] svg')"
TIP = "document.querySelector('[data-chart=\"loss\"] .tip').innerText"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with Browser(tmp_path_factory.mktemp("home")) as browser:
        yield browser


@pytest.fixture(scope="module")
def single_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("one")
    return write_report(find_runs([make_run(folder / "first")]), folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("several")
    arguments = {"max_steps": 100, "learning_rate": 0.2}
    make_run(folder / "first")
    make_run(folder / "second", training(rate=0.2), {"status": "failed", "arguments": arguments})
    return write_report(find_runs([folder]), folder / "report.html").as_uri()


def place_of(browser: Browser, step: float) -> tuple[float, float]:
    """Return where on the screen a step is in the chart of losses."""
    x, y = browser.run(
        f"(() => {{ {CHART}.scrollIntoView(); const box = {CHART}.getBoundingClientRect();"
        f" return [box.x + page.charts[0].x({step}), box.y + 60]; }})()"
    )
    return x, y


def test_a_page_opens_without_a_fault_and_asks_for_nothing(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    assert browser.run("document.querySelector('h1').innerText") == "first"
    assert browser.run("document.querySelectorAll('figure.chart').length") == 7
    drawn = browser.run(f"[...{CHART}.querySelectorAll('.curve')].map((one) => one.getAttribute('d').length)")
    assert len(drawn) == 2
    assert min(drawn) > 30
    marks = browser.run(f"[...{CHART}.querySelectorAll('.mark')].map((one) => one.getAttribute('class'))")
    assert sorted(marks) == ["mark best", "mark best", "mark fail", "mark resume"]  # the save is that of a best one
    assert (browser.problems, browser.requests) == ([], [single_run])


def test_the_mouse_shows_numbers_in_all_charts(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    browser.mouse("mouseMoved", *place_of(browser, 30))
    assert browser.run(TIP).split() == ["step", "30", "loss", "0.36788", "eval_loss", "0.25"]
    legends = browser.run("[...document.querySelectorAll('.legend b')].map((one) => one.innerText)")
    assert legends[:3] == ["0.36788", "0.25", "0.75"]
    assert browser.run("document.querySelectorAll('.cursor').length") == 7
    browser.mouse("mouseMoved", *place_of(browser, 60))
    assert "died: killed" in browser.run(TIP)
    browser.mouse("mouseMoved", 2, 2)
    assert browser.run("document.querySelectorAll('.cursor').length") == 0


def test_a_drag_zooms_in_and_a_double_click_out(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    (left, y), (right, _) = place_of(browser, 20), place_of(browser, 40)
    browser.mouse("mousePressed", left, y)
    browser.mouse("mouseMoved", right, y)
    browser.mouse("mouseReleased", right, y)
    assert browser.run("page.range().map(Math.round)") == [20, 40]
    assert browser.run("document.getElementById('unzoom').hidden") is False
    browser.run("document.getElementById('unzoom').click()")
    assert browser.run("page.range()") == [0, 100]


def test_keys_move_the_cursor_and_say_where_it_is(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    reached: list[str] = []
    for _ in range(12):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.getAttribute('aria-label') || document.activeElement.id"))
        if reached[-1] == "Loss: cursor":
            break
    assert reached[-1] == "Loss: cursor"
    assert {"smoothing", "log", "events", "theme"} <= set(reached)
    outline = browser.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    announced = "document.activeElement.getAttribute('aria-valuetext')"
    assert browser.run(announced).startswith("step 100: loss 0.035674, eval_loss 1")
    browser.press("Home")
    assert browser.run(announced).startswith("step 1: ")
    browser.press("ArrowRight")
    browser.press("ArrowRight", shift=True)
    assert browser.run(announced).startswith("step 12: loss 0.67032")
    browser.press("ArrowLeft")
    assert browser.run(announced).startswith("step 11: ")
    assert "step 11" in browser.run(TIP)
    browser.press("+")
    low, high = browser.run("page.range()")
    assert high - low < 60
    browser.press("0")
    browser.press("Escape")
    assert browser.run("page.cursor") is None
    assert browser.run("page.range()") == [0, 100]


def test_smoothing_log_scale_and_axis(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    path = f"{CHART}.querySelector('.curve').getAttribute('d')"
    before, curves = browser.run(path), f"{CHART}.querySelectorAll('.curve').length"
    browser.run("{ const slider = document.getElementById('smoothing'); slider.value = 0.9; "
                "slider.dispatchEvent(new Event('input')); }")  # fmt: skip
    assert browser.run(curves) == 3  # of an evaluation nothing is smoothed
    assert browser.run("smoothed([1, null, 3], 0.5)") == [1, None, pytest.approx((0.5 * 0.5 * 1 + 0.5 * 3) / 0.75)]
    browser.run("document.getElementById('log').click()")
    assert browser.run(path) != before
    browser.run("document.querySelector('[value=\"seconds\"]').click()")
    assert browser.run("page.range()") == [0, 50]
    browser.run("document.querySelector('[value=\"samples\"]').click()")
    assert browser.run("page.range()") == [0, 800]
    browser.run("document.getElementById('events').click()")
    assert browser.run("document.querySelectorAll('figure .mark').length") == 0
    assert browser.problems == []


def test_light_and_dark(browser: Browser, single_run: str) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    browser.open(single_run)
    light = browser.run(back)
    browser.open(single_run, is_dark=True)
    dark = browser.run(back)
    assert (light, dark) == ("rgb(246, 247, 249)", "rgb(16, 19, 23)")
    browser.run("document.getElementById('theme').click()")
    assert browser.run(back) == light
    browser.run("document.getElementById('theme').click()")
    assert browser.run(back) == dark
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("width", [375, 768])
def test_a_phone_scrolls_down_and_not_aside(browser: Browser, single_run: str, several: str, width: int) -> None:
    for url in (single_run, several):
        browser.open(url, width=width, height=812, is_phone=True)
        assert browser.run("document.documentElement.scrollWidth") == width
        widest = browser.run("Math.max(...[...document.querySelectorAll('figure')].map((one) => one.clientWidth))")
        assert 0.8 * width < widest <= width
        assert browser.problems == []


def test_runs_are_compared(browser: Browser, several: str) -> None:
    browser.open(several)
    assert browser.run("document.querySelector('h1').innerText") == "2 runs compared"
    assert browser.run(f"{CHART}.querySelectorAll('.curve').length") == 4
    differing = "[...document.querySelectorAll('#arguments tbody tr')].map((one) => one.innerText.split('\\t'))"
    assert browser.run(differing) == [["learning_rate", "0.1", "0.2"], ["fsdp.offload", "True", "\u2013"]]
    browser.run("document.querySelector('#arguments input[type=checkbox]').click()")
    assert len(browser.run(differing)) == 3
    browser.run("{ const search = document.querySelector('#arguments .search'); search.value = 'steps'; "
                "search.dispatchEvent(new Event('input')); }")  # fmt: skip
    assert browser.run(differing) == [["max_steps", "100", "100"]]
    browser.run("document.querySelector('#runs input').click()")
    assert browser.run(f"{CHART}.querySelectorAll('.curve').length") == 2
    assert (browser.problems, browser.requests) == ([], [several])


def test_no_text_of_a_run_is_ever_code(browser: Browser, tmp_path: Path) -> None:
    bad = "</script><script>window.harm=1</script><img src=x onerror=window.harm=1>"
    lines: list[dict[str, Any]] = [*training(), line(bad, 100, why=bad), line("log", 101, **{bad: 1.0})]
    facts = {"status": "failed", "state": {"reason": bad}, "arguments": {bad: bad}}
    (run,) = find_runs([make_run(tmp_path / "one", lines, facts)])
    run.name = bad
    url = write_report([run], tmp_path / "report.html").as_uri()
    browser.open(url)
    browser.mouse("mouseMoved", *place_of(browser, 100))
    assert browser.run("document.querySelector('h1').innerText") == bad
    assert browser.run("[window.harm === undefined, document.images.length]") == [True, 0]
    assert browser.requests == [url]
    # And if one were: the page says what may run, and this may not.
    browser.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps('<img src=x onerror=window.harm=1>')})")
    assert browser.run("new Promise((done) => setTimeout(() => done(window.harm === undefined), 100))") is True


def test_nan_is_a_gap_and_a_mark(browser: Browser, tmp_path: Path) -> None:
    lines = [line("log", step, loss="NaN" if step == 5 else 1.0) for step in range(1, 10)]
    url = write_report(find_runs([make_run(tmp_path / "one", lines)]), tmp_path / "report.html").as_uri()
    browser.open(url)
    assert browser.run(f"{CHART}.querySelector('.curve').getAttribute('d').split('M').length") == 3  # two parts
    assert browser.run(f"{CHART}.querySelectorAll('.lost').length") == 1
    assert "1 × no number" in browser.run("document.querySelector('.legend').innerText")


@pytest.mark.slow
def test_a_live_page_draws_new_values(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", [line("log", 1, loss=1.0)], {"status": "running"})
    live = LiveReport(find_runs([folder]))
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        browser.open(live.url)
        browser.run("document.getElementById('log').click()")
        with (folder / "history.jsonl").open("a") as file:
            file.write(f"{json.dumps(line('log', 2, loss=0.5))}\n")
        browser.wait_until("document.querySelector('.legend b').innerText === '0.5'")
        assert browser.run("document.getElementById('log').checked") is True  # the setting is kept
        assert browser.problems == []
        assert {url.removeprefix(live.url) for url in browser.requests} == {"", "data.json"}
    finally:
        browser.open("about:blank")
        live.close()
        thread.join()


def test_samples_are_shown_by_evaluation_with_their_images(browser: Browser, tmp_path: Path) -> None:
    picture = png_uri(torch.eye(8)[None])
    columns, images = ["input", "prediction"], [[picture, None], ["javascript:alert(1)", None]]
    lines = [
        line("predictions", 5, columns=columns, rows=[["1×8×8", "<b>cat</b>"], ["other", 2]], images=images),
        line("predictions", 9, columns=columns, rows=[["1×8×8", "dog"], ["other", 3]]),
    ]
    browser.open(write_report(find_runs([make_run(tmp_path / "one", lines)]), tmp_path / "report.html").as_uri())
    cells = (
        "[...document.querySelectorAll('#samples tbody tr')].map((row) => [...row.cells].map((one) => one.innerText))"
    )
    assert browser.run(cells) == [["", "dog"], ["other", "3"]]
    loaded = "[...document.images].map((image) => [image.complete, image.naturalWidth, image.alt])"
    browser.wait_until("document.images[0].complete")
    assert browser.run(loaded) == [[True, 8, "1×8×8"]]
    browser.run("{ const slider = document.querySelector('#samples input'); slider.value = 0;"
                "slider.dispatchEvent(new Event('input')); }")  # fmt: skip
    assert browser.run(cells) == [["", "<b>cat</b>"], ["other", "2"]]
    assert browser.run("document.querySelector('#samples output').innerText") == "step 5"
    assert "predictions" not in browser.run("(document.querySelector('[aria-label^=Events]') || {}).innerText || ''")
    assert browser.problems == []


def test_tables_are_copied_and_charts_saved(browser: Browser, single_run: str) -> None:
    browser.open(single_run)
    table = browser.run("tableText(document.querySelector('[aria-label^=Evaluations] table'))")
    assert table.splitlines()[:2] == ["step\tepoch\teval_loss\teval_accuracy\t", "100\t2\t1\t0.5\t"]
    text = browser.run("chartFile(page.charts[0]).text")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.findall(f"{space}text")] == ["Loss", "loss", "eval_loss"]
    strokes = {path.get("stroke") for path in root.iter(f"{space}path") if path.get("fill") == "none"}
    assert strokes >= {"rgb(47, 111, 221)", "rgb(221, 122, 18)"}  # no names of the page's style are left
    browser.run("{ window.saved = []; download = (source, name) => window.saved.push([name, source.slice(0, 22)]); }")
    for kind in ("SVG", "PNG"):
        browser.run(f"document.querySelector('[aria-label=\"Save Loss as {kind}\"]').click()")
    browser.wait_until("window.saved.length === 2")
    assert browser.run("window.saved") == [
        ["loss.svg", "data:image/svg+xml;cha"],
        ["loss.png", "data:image/png;base64,"],
    ]
    assert browser.problems == []


def test_a_printed_page_has_whole_tables_and_no_controls(browser: Browser, single_run: str) -> None:
    browser.open(single_run, is_dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print")
    try:
        shown = "[...document.querySelectorAll('.bar, .copy, .search')].filter((one) => one.offsetParent).length"
        assert browser.run(shown) == 0
        assert browser.run("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    finally:
        browser.send("Emulation.setEmulatedMedia", media="")


NAMES = "[...document.querySelectorAll('tbody tr')].map((row) => row.dataset.run)"


def test_all_runs_are_searched_and_sorted(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "first # 1")
    make_run(tmp_path / "deep" / "second", [line("log", 3, loss=0.01)], {"status": "failed", "created": 1.0})
    write_report(find_runs([tmp_path / "first # 1"]), tmp_path / "first # 1" / "report.html")
    url = write_runs_page(tmp_path, tmp_path / "index.html").as_uri()
    browser.open(url)
    assert browser.run(NAMES) == ["first # 1", "deep/second"]  # the newest first
    browser.run("[...document.querySelectorAll('.sort')].find((one) => one.innerText === 'loss').click()")
    assert browser.run(NAMES) == ["deep/second", "first # 1"]
    assert browser.run("document.querySelector('[aria-sort=ascending]').innerText").startswith("loss")
    browser.run("{ const search = document.querySelector('.search'); search.value = 'accuracy FIN';"
                "search.dispatchEvent(new Event('input')); }")  # fmt: skip
    assert browser.run(NAMES) == ["first # 1"]
    assert browser.run("document.getElementById('count').innerText") == "1 of 2 runs"
    assert browser.run("[...document.querySelectorAll('td a')].map((link) => link.getAttribute('href'))") == [
        "./first%20%23%201/report.html"
    ]
    assert (browser.problems, browser.requests) == ([], [url])


@pytest.mark.slow
def test_live_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    for name in ("first + one", "second"):
        make_run(tmp_path / name, [line("log", 1, loss=1.0)], {"status": "running"})
    live = LiveRuns(tmp_path)
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        browser.open(live.url)
        make_run(tmp_path / "third", [line("log", 1, loss=1.0)])
        browser.wait_until(f"{NAMES}.length === 3")
        for name in ("first + one", "second"):
            browser.run(f"document.querySelector('[data-run=\"{name}\"] input').click()")
        browser.run("document.getElementById('compare').click()")
        browser.wait_until(
            "document.querySelector('h1') && document.querySelector('h1').innerText === '2 runs compared'"
        )
        with (tmp_path / "second" / "history.jsonl").open("a") as file:
            file.write(f"{json.dumps(line('log', 2, loss=0.5))}\n")
        browser.wait_until("[...document.querySelectorAll('.legend b')].some((one) => one.innerText === '0.5')")
        assert browser.problems == []
        for path in ("nowhere/", "..%2F..%2Fetc%2Fpasswd/", "second+nowhere/data.json"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{live.url}{path}", timeout=10)
            refused.value.close()
    finally:
        browser.open("about:blank")
        live.close()
        thread.join()


def test_a_run_that_said_nothing_yet_has_a_page(browser: Browser, tmp_path: Path) -> None:
    url = write_report(find_runs([make_run(tmp_path / "one", [], {})]), tmp_path / "report.html").as_uri()
    browser.open(url)
    assert "Nothing was logged yet" in browser.run("document.body.innerText")
    assert browser.problems == []


SETS = [f"eval_{name}_{metric}" for name in ("dev", "test") for metric in ("loss", "accuracy", "perplexity")]


def of_a_failed_run(folder: Path) -> dict[str, Any]:
    """Write a run that failed, with six metrics, and return its facts; of its checkpoints two are there."""
    lines = [line("started", 0, processes=4, precision="no", device="cpu", max_steps=50)]
    saved: list[dict[str, Any]] = []
    for step in range(5, 55, 5):
        lines.append(line("log", step, loss=1 / step))
        lines.append(line("evaluation", step, **dict.fromkeys(SETS, 0.123456)))
        path = folder / "checkpoints" / f"checkpoint-{step:08d}"
        lines.append(line("save", step, path=str(path), why=["best", "interval"], took=0.25))
        if step in (10, 50):
            path.mkdir(parents=True)
            saved.append({"path": str(path), "step": step})
    text = "Traceback (most recent call last):\n" + '  File "train.py", line 1\n' * 60 + "ValueError: too wide\n"
    lines.append(line("ended", 50, status="failed", reason="ValueError: too wide", traceback=text))
    best = {"metric": SETS[0], "value": 0.1, "step": 10}
    arguments = {"output_dir": str(folder), "run_name": folder.name, "learning_rate": 0.1}
    facts = {"status": "failed", "state": {"best": best, "checkpoints": saved}, "arguments": arguments}
    make_run(folder / "run", lines, facts)
    return facts


@pytest.mark.parametrize("width", [1280, 1440])
def test_no_table_is_cut_at_the_right_edge(browser: Browser, tmp_path: Path, width: int) -> None:
    of_a_failed_run(tmp_path)
    url = write_report(find_runs([tmp_path / "run"]), tmp_path / "report.html").as_uri()
    browser.open(url, width=width)
    cut = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    assert browser.run("document.querySelectorAll('.scroll table').length") >= 4
    assert browser.run(cut) == 0
    assert browser.problems == []


def test_each_event_is_named_in_its_row(browser: Browser, tmp_path: Path) -> None:
    kinds = [line("skipped", 70, reason="NaN"), line("left_out", 80), line("resumed", 90, steps_lost=0)]
    run = make_run(tmp_path / "run", [*training()[:-1], *kinds, training()[-1]])
    browser.open(write_report(find_runs([run]), tmp_path / "report.html").as_uri())
    inside = browser.run(
        "[...document.querySelectorAll('.event-kind')].map(name => {"
        " const [box, cell] = [name, name.closest('td')].map(each => each.getBoundingClientRect());"
        " return [name.innerText, box.top >= cell.top && box.left >= cell.left && box.bottom <= cell.bottom]; })"
    )
    assert len(inside) >= 6
    assert [name for name, is_inside in inside if not is_inside] == []


def test_a_failed_run_shows_its_traceback_to_the_end(browser: Browser, tmp_path: Path) -> None:
    of_a_failed_run(tmp_path)
    browser.open(write_report(find_runs([tmp_path / "run"]), tmp_path / "report.html").as_uri())
    text = "document.querySelector('.traceback pre')"
    assert browser.run(f"{text}.innerText").endswith("ValueError: too wide\n")
    browser.wait_until(f"{text}.scrollTop > 0 && {text}.scrollTop + {text}.clientHeight >= {text}.scrollHeight - 1")
    figures = browser.run("[...document.querySelectorAll('.figures div')].map((one) => one.innerText.split('\\n'))")
    assert ["Processes", "4"] in figures


def test_existing_checkpoints_come_first(browser: Browser, tmp_path: Path) -> None:
    of_a_failed_run(tmp_path)
    browser.open(write_report(find_runs([tmp_path / "run"]), tmp_path / "report.html").as_uri())
    rows = "[...document.querySelectorAll('[aria-label^=Checkpoints] tbody tr')].map((one) => one.cells[0].innerText)"
    assert browser.run(rows) == ["10", "50", "45", "40", "35", "30", "25", "20", "15", "5"]


@pytest.mark.slow
def test_paths_are_no_difference_between_runs(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        of_a_failed_run(tmp_path / name)
    runs = find_runs([tmp_path / "first" / "run", tmp_path / "second" / "run"])
    browser.open(write_report(runs, tmp_path / "report.html").as_uri())
    assert browser.run("document.querySelectorAll('#arguments tr.differs').length") == 0
    assert "nothing does" in browser.run("document.querySelector('#arguments label').innerText")
