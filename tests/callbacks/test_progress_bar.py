"""Tests of the progress bar: in a terminal, in a file, and on several ranks."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from tqdm import tqdm

from tests.callbacks.loops import evaluate, go_through, running
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import ProgressBar
from trainer_lib.events import Dispatcher, Run


@dataclass
class Arguments:
    time_limit: float | None = None


class Screen:
    """A terminal, and what one sees on it."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._read, write = pty.openpty()
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.file: TextIO = os.fdopen(write, "w")
        self.written = ""

    def take(self) -> str:
        """Return what was written since the last time."""
        self.file.flush()
        os.set_blocking(self._read, False)
        parts: list[bytes] = []
        while True:
            try:
                parts.append(os.read(self._read, 65536))
            except BlockingIOError:
                break
        text = b"".join(parts).decode()
        self.written += text
        return text

    def close(self) -> None:
        self.file.close()
        os.close(self._read)

    def lines(self) -> list[str]:
        """Return the lines that are seen in the end."""
        self.take()
        lines, row = [""], 0
        for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", self.written.replace("\r\n", "\n\r")):
            if part == "\x1b[A":
                row -= 1
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part != "\r":
                lines[row] = part + lines[row][len(part) :]
        return [line.rstrip() for line in lines]


def at_once(bar: ProgressBar) -> Callable[[Run], None]:
    """Have the bar move in each step, as if much time had passed."""

    def hurry(run: Run) -> None:
        bar._next = 0.0

    return hurry


@pytest.fixture
def screen() -> Iterator[Screen]:
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # one that a run with an error left would take a line of this screen
    screen = Screen()
    yield screen
    screen.close()


def test_a_terminal_shows_progress_and_the_last_log(screen: Screen) -> None:
    bar = ProgressBar(screen.file)
    seen: list[str] = []

    def look(run: Run) -> None:
        bar._next = 0.0
        seen.append(screen.take())

    go_through([bar], 4, running(max_steps=4), log_every=2, loss=lambda step: step / 8, at_step=look)
    assert [re.findall(r"\d/4", text) for text in seen] == [["0/4"], ["1/4"], ["2/4"], ["3/4"]]
    assert "loss 0.25, epoch 0" in seen[3]
    assert "loss 0.25, epoch 0" not in seen[2]
    [line, curve, rest] = screen.lines()
    assert re.fullmatch(r"train: 100%\|█+\| 4/4, loss 0.5, epoch 0 \[00:00<00:00, .*it/s\]", line)
    assert (curve, rest) == ("loss  ▁█  0.25 → 0.5", "")


def test_the_learning_rate_is_shown_and_the_steps_before_a_restart_count(screen: Screen) -> None:
    bar, run = ProgressBar(screen.file), running(max_steps=200, step=150)
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    assert "train:  75%" in screen.take()
    events.fire("on_log", run, {"loss": 0.123456, "learning_rate": 5e-5})
    time.sleep(0.05)
    run.state.step, bar._next = 151, 0.0
    events.fire("on_step_end", run)
    shown = screen.take()
    assert "loss 0.1235, epoch 0, lr 5e-05" in shown
    speed = re.search(r"151/200, .* \[.*<.*, +([0-9.]+)it/s", shown)
    assert speed is not None
    assert float(speed[1]) < 20.5  # one update in 0.05 s, not 151
    events.fire("on_fit_end", run)


@pytest.mark.parametrize(
    ("columns", "lines", "length"), [(60, 24, 60), (100, 24, 100), (0, 24, 80), (0, 0, 80), (60, 0, 60)]
)
def test_a_bar_is_as_wide_as_the_terminal_if_that_says(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, length: int
) -> None:
    screen = Screen(columns, lines)
    monkeypatch.setattr(sys, "stderr", screen.file)  # for which tqdm reads the number of lines
    go_through([ProgressBar(screen.file)], 2, running(max_steps=2))
    assert length - 1 <= len(screen.lines()[0]) <= length
    screen.close()


def test_a_narrow_terminal_shows_the_loss() -> None:
    screen = Screen(60)
    bar, run = ProgressBar(screen.file), running(max_steps=100_000, step=99_000)
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    events.fire("on_log", run, {"loss": 0.123456, "learning_rate": 5e-5})
    run.state.step, bar._next = 99_001, 0.0
    events.fire("on_step_end", run)
    assert "99001/100000, loss 0.1235" in screen.take()
    events.fire("on_fit_end", run)
    screen.close()


def test_without_a_total_it_counts(screen: Screen) -> None:
    go_through([ProgressBar(screen.file)], 7)
    assert re.fullmatch(r"train: 7it \[00:00, .*it/s\]", screen.lines()[0])


def test_a_time_limit_is_the_total_without_a_step_limit(screen: Screen) -> None:
    bar, run = ProgressBar(screen.file), running(seconds=30.0)
    run.args = Arguments(time_limit=40.0)
    go_through([bar], 3, run, at_step=at_once(bar))
    assert re.match(r"train:  75%\|█+.*\| 00:30/00:40, step 3$", screen.lines()[0])
    run = running(max_steps=3)
    run.args = Arguments(time_limit=40.0)
    go_through([ProgressBar(screen.file)], 3, run)
    assert "3/3" in screen.lines()[1]


def test_a_run_over_its_time_is_at_its_end(screen: Screen) -> None:
    run = running(seconds=50.0)
    run.args = Arguments(time_limit=40.0)
    go_through([ProgressBar(screen.file)], 1, run)
    assert screen.lines()[0].startswith("train: 100%")


def test_an_evaluation_has_a_bar_below_that_goes_and_its_metrics_stay_above(screen: Screen) -> None:
    bar = ProgressBar(screen.file)
    events, run = Dispatcher([bar]), running(max_steps=4)
    events.fire("on_fit_begin", run)
    run.state.step, bar._next = 2, 0.0
    events.fire("on_step_end", run)
    events.fire("on_evaluate_begin", run)
    events.fire("on_evaluate_set_begin", run, "news", 5)
    for _ in range(3):
        bar._inner_next = 0.0
        events.fire("on_evaluate_batch_end", run)
    during = screen.lines()
    assert during[0].startswith("train:  50%")
    assert re.match(r"evaluate news:  60%\|.*\| 3/5 \[", during[1])
    events.fire("on_evaluate_set_end", run, "news", {"eval_news_loss": 0.25})
    events.fire("on_evaluate_end", run, {"eval_news_loss": 0.25})
    run.state.step, bar._next = 4, 0.0
    events.fire("on_step_end", run)
    events.fire("on_fit_end", run)
    lines = screen.lines()
    assert lines[0].rstrip() == "step 2/4, epoch 0: eval_news_loss 0.25"
    assert lines[1].startswith("train: 100%")
    assert "".join(lines[2:]) == ""


def test_evaluations_do_not_count_in_the_speed(screen: Screen) -> None:
    bar, run = ProgressBar(screen.file), running(max_steps=4)
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    bar._paused_at = time.perf_counter() - 1000
    events.fire("on_evaluate_end", run, {})
    bar._paused_at = time.perf_counter()
    assert bar._train is not None
    bar._train._bar.start_t -= 1000  # type: ignore[attr-defined]
    bar._train._bar.last_print_t -= 1000  # type: ignore[attr-defined]
    run.state.step, bar._next = 2, 0.0
    events.fire("on_step_end", run)
    assert "2/4 [00:0" in screen.take()
    events.fire("on_fit_end", run)


def test_an_evaluation_and_a_prediction_on_their_own_have_a_bar(screen: Screen) -> None:
    bar, run = ProgressBar(screen.file), Run()
    events = Dispatcher([bar])
    evaluate(events, run, {"eval_loss": 1.0}, batches=5)
    events.fire("on_predict_begin", run, None)
    for _ in range(2):
        bar._inner_next = 0.0
        events.fire("on_predict_batch_end", run)
    events.fire("on_predict_end", run)
    first, second, rest = screen.lines()
    assert re.match(r"evaluate: 100%\|█+\| 5/5 \[", first)
    assert re.match(r"predict: 2it \[", second)
    assert rest == ""


@pytest.mark.parametrize("event", ["on_exception", "on_interrupt"])
def test_every_end_of_a_run_leaves_complete_bars(screen: Screen, event: str) -> None:
    bar, run = ProgressBar(screen.file), running(max_steps=4)
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    run.state.step = 3
    events.fire("on_evaluate_begin", run)
    events.fire("on_evaluate_set_begin", run, "", 5)
    events.fire(event, run, *([ValueError()] if event == "on_exception" else []))
    events.fire("on_fit_end", run)
    screen.file.write("Traceback\n")
    assert re.match(r"train:  75%\|.*\| 3/4 \[", screen.lines()[0])
    assert screen.lines()[1] == "Traceback"


def test_log_lines_and_warnings_come_above_the_bar(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen.file)
    handler = logging.StreamHandler(screen.file)
    monkeypatch.setattr(logging.root, "handlers", [handler])

    def before(message: Any, *args: Any, **kwargs: Any) -> None:
        screen.file.write(f"{message}\n")

    monkeypatch.setattr(warnings, "showwarning", before)
    bar = ProgressBar()

    def speak(run: Run) -> None:
        if run.state.step == 1:
            logging.getLogger("speaker").warning("a line")
            warnings.showwarning(UserWarning("a warning"), UserWarning, __file__, 1)

    go_through([bar], 2, running(max_steps=2), at_step=speak)
    lines = screen.lines()
    assert lines[0] == "a line"
    assert lines[1] == "a warning"
    assert re.match(r"train: 100%\|.*2/2 ", lines[2])
    assert logging.root.handlers == [handler]
    assert warnings.showwarning is before


def test_the_accelerator_prints_above_the_bar(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen.file)
    monkeypatch.setattr(sys, "stdout", screen.file)
    bar, accelerator = ProgressBar(), Accelerator(cpu=True)

    def speak(run: Run) -> None:
        at_once(bar)(run)
        if run.state.step == 2:
            accelerator.print("a line")

    go_through([bar], 3, running(max_steps=3), at_step=speak)
    lines = screen.lines()
    assert lines[0] == "a line"
    assert re.match(r"train: 100%\|.*3/3 ", lines[1])


def test_handlers_that_do_not_write_to_the_console_stay_alone(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.root, "handlers", [elsewhere])

    def speak(run: Run) -> None:
        assert logging.root.handlers == [elsewhere]

    go_through([ProgressBar(screen.file)], 2, running(max_steps=2), at_step=speak)


def test_a_file_gets_complete_lines_at_intervals(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as file:
        bar = ProgressBar(file=file)
        hurry = at_once(bar)
        go_through(
            [bar],
            100,
            running(max_steps=100),
            log_every=50,
            evaluations={60: {"eval_loss": 0.5}},
            at_step=lambda run: hurry(run) if run.state.step == 49 else None,
        )
        file.seek(0)
        text = file.read()
    assert "\r" not in text
    first, second, third = text.splitlines()
    assert re.fullmatch(r"train: 50/100 \(50%\), [0-9.e+]+ it/s, 00:00 so far, 00:00 left", first)
    assert second == "step 60/100, epoch 0: eval_loss 0.5"
    assert re.fullmatch(r"train: 100/100 \(100%\), .* it/s, 00:00 so far, 00:00 left, loss 0.01, epoch 0", third)


def test_seconds_per_line_sets_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("trainer_lib.callbacks.progress_bar.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    file = io.StringIO()
    bar, run = ProgressBar(file=file, seconds_per_line=2.0), running()
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    for _ in range(10):
        clock[0] += 1.0
        run.state.step += 1
        events.fire("on_step_end", run)
    assert len(file.getvalue().splitlines()) == 5
    events.fire("on_fit_end", run)
    assert re.match(rf"train: {run.state.step}, .* it/s, 00:00 so far$", file.getvalue().splitlines()[-1])


def test_a_long_evaluation_gets_lines_in_a_file_too() -> None:
    file = io.StringIO()
    bar, run = ProgressBar(file=file), running()
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    events.fire("on_evaluate_set_begin", run, "", 3)
    events.fire("on_evaluate_batch_end", run)
    bar._inner_next = 0.0
    events.fire("on_evaluate_batch_end", run)
    events.fire("on_evaluate_set_end", run, "", {})
    assert [line.split(",")[0] for line in file.getvalue().splitlines()] == ["evaluate: 2/3 (67%)"] * 2


def test_time_is_shown_as_time_in_a_file() -> None:
    file = io.StringIO()
    run = running(seconds=30.0)
    run.args = Arguments(time_limit=120.0)
    go_through([ProgressBar(file=file)], 2, run, log_every=1, loss=lambda step: 0.5)
    assert re.fullmatch(r"train: 00:30/02:00 \(25%\), 01:(30|29) left, step 2, loss 0.5, epoch 0\n", file.getvalue())


def test_the_main_process_alone_shows_it(tmp_path: Path) -> None:
    def body() -> None:
        accelerator = Accelerator(cpu=True)
        run = running(max_steps=3)
        run.accelerator = accelerator
        with (tmp_path / str(accelerator.process_index)).open("w") as file:
            bar = ProgressBar(file=file)
            go_through([bar], 3, run, evaluations={2: {"eval_loss": 1.0}}, at_step=at_once(bar))

    run_world(body, timeout=60)
    assert (tmp_path / "0").read_text().count("train: ") == 4
    assert (tmp_path / "1").read_text() == ""


def test_a_file_that_cannot_be_written_costs_the_bar_and_nothing_else(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, bar = warnings.showwarning, ProgressBar(screen.file)

    def break_it(run: Run) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError("no terminal any more")

        assert bar._train is not None
        bar._train.show = refuse  # type: ignore[method-assign]
        bar._next = 0.0

    run = running(max_steps=3)
    state_at_end = go_through([bar], 3, run, at_step=lambda run: break_it(run) if run.state.step == 1 else None).state
    assert state_at_end.step == 3
    assert "The callback ProgressBar raised in on_step_end at step 2" in caplog.text
    assert warnings.showwarning is before


def test_a_step_costs_two_calls_between_two_looks(screen: Screen) -> None:
    bar, run = ProgressBar(screen.file), running(max_steps=1000)
    events = Dispatcher([bar])
    events.fire("on_fit_begin", run)
    bar._next += 100
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    for _ in range(10):
        events.fire("on_step_end", run)
    sys.setprofile(None)
    assert calls == ["fire", "on_step_end"] * 10
    events.fire("on_fit_end", run)
