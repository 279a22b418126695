"""A progress bar of the run."""

import math
import sys
import time
from contextlib import ExitStack
from typing import ClassVar, TextIO

from trainer_lib.callbacks.console import line_of, print_curves
from trainer_lib.events import Callback, Run
from trainer_lib.progress import Progress, is_live, lines_above_bars, show_progress
from trainer_lib.runs.report.sparkline import shows_sparklines


class ProgressBar(Callback):
    """Shows progress, speed and remaining time of training, and the loss and learning rate of the last log.

    In a terminal or notebook it is a bar, with a second bar for each evaluation and prediction, and the metrics of each
    evaluation above; in a file it is a line every `seconds_per_line`. Rank 0 shows it. Each step reads the clock; the
    bar is redrawn five times a second.

    Args:
        file: Where to show it; by default standard error.
        seconds_per_line: The time between two lines in a file.

    Example:
        >>> from trainer_lib.events import RunState
        >>> bar, run = ProgressBar(file=sys.stdout), Run(state=RunState(max_steps=2))
        >>> bar.on_fit_begin(run)
        >>> run.state.step = 2
        >>> bar.on_step_end(run)
        >>> bar.on_fit_end(run)
        train: 2/2 (100%), ... it/s, 00:00 so far, 00:00 left
    """

    order = 100  # after the callbacks that add values to the log
    is_display: ClassVar[bool] = True
    reads_outputs: ClassVar[bool] = False

    def __init__(self, file: TextIO | None = None, seconds_per_line: float = 30.0) -> None:
        self._file, self._seconds_per_line = file, seconds_per_line
        self._train: Progress | None = None
        self._next = math.inf  # when to redraw
        self._limit: float | None = None  # in seconds, if a time limit ends training
        self._began = self._paused_at = 0.0
        self._text = ""
        self._inner: Progress | None = None  # of an evaluation or a prediction
        self._inner_next = math.inf
        self._inner_done = 0
        self._above = ExitStack()

    # -- training ------------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._close(run)  # of an earlier run
        if not run.is_main_process:
            return
        state, file = run.state, self._file or sys.stderr
        self._limit = None if state.max_steps is not None else getattr(run.args, "time_limit", None)
        self._began = time.perf_counter() - state.seconds
        if is_live(file):
            self._above.enter_context(lines_above_bars())
        self._text = ""
        self._train = show_progress(
            "train",
            file,
            total=state.max_steps if self._limit is None else self._limit,
            done=self._done(run),
            in_seconds=self._limit is not None,
            seconds_per_line=self._seconds_per_line,
        )
        self._next = time.perf_counter() + self._train.interval

    def on_step_end(self, run: Run) -> None:
        if time.perf_counter() >= self._next:
            self._show(run)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        # The loss comes first, since a narrow terminal cuts the end.
        shown = {"loss": values.get("loss"), "epoch": run.state.epochs, "lr": values.get("learning_rate")}
        self._text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)

    def on_fit_end(self, run: Run) -> None:
        was_shown = self._train is not None
        self._close(run)
        file = self._file or sys.stderr
        if was_shown and run.state.has_ended and shows_sparklines(file):
            print_curves(run, file)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close(run)

    def on_interrupt(self, run: Run) -> None:
        self._close(run)

    # -- evaluation and prediction -------------------------------------------------------------------------------

    def on_evaluate_begin(self, run: Run) -> None:
        self._paused_at = time.perf_counter()

    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        self._open_inner(run, f"evaluate {name}".rstrip(), batches)

    def on_evaluate_batch_end(self, run: Run) -> None:
        self._move_inner()

    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        self._close_inner()

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._train is not None:
            self._train.write(line_of(run, metrics))
            if self._limit is None:  # the speed excludes evaluations
                self._train.leave_out(time.perf_counter() - self._paused_at)

    def on_predict_begin(self, run: Run, batches: int | None) -> None:
        self._open_inner(run, "predict", batches)

    def on_predict_batch_end(self, run: Run) -> None:
        self._move_inner()

    def on_predict_end(self, run: Run) -> None:
        self._close_inner()

    # -- private -------------------------------------------------------------------------------------------------

    def _done(self, run: Run) -> float:
        return run.state.step if self._limit is None else min(time.perf_counter() - self._began, self._limit)

    def _caption(self, run: Run) -> str:
        return self._text if self._limit is None else f"step {run.state.step}, {self._text}".rstrip(", ")

    def _show(self, run: Run) -> None:
        assert self._train is not None
        try:
            self._train.tell(self._caption(run))
            self._train.show(self._done(run))
        except BaseException:
            self._above.close()  # otherwise log lines still look for the bar
            raise
        self._next = time.perf_counter() + self._train.interval

    def _open_inner(self, run: Run, title: str, total: int | None) -> None:
        self._close_inner()  # left open by an error
        if run.is_main_process:
            file, stays = self._file or sys.stderr, self._train is None
            self._inner = show_progress(title, file, total=total, stays=stays, seconds_per_line=self._seconds_per_line)
            self._inner_next = time.perf_counter() + self._inner.interval

    def _move_inner(self) -> None:
        self._inner_done += 1
        if self._inner is not None and time.perf_counter() >= self._inner_next:
            self._inner.show(self._inner_done)
            self._inner_next = time.perf_counter() + self._inner.interval

    def _close_inner(self) -> None:
        if self._inner is not None:
            self._inner.close(self._inner_done)
        self._inner, self._inner_done = None, 0

    def _close(self, run: Run) -> None:
        self._close_inner()
        if self._train is not None:
            self._train.tell(self._caption(run))
            self._train.close(self._done(run))
        self._train, self._next = None, math.inf
        self._above.close()
