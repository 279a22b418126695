"""Elapsed and remaining time of a run, split into training, evaluation and saving."""

import time
from pathlib import Path

from trainer_lib.events import Callback, Run

_KINDS: tuple[str, ...] = ("evaluation", "saving")


class Timer(Callback):
    """Adds `elapsed_seconds` to each log, and `remaining_seconds` if the end is known.

    Both include evaluations and saves. The remaining time is extrapolated from the time so far: it is inaccurate at
    first, and with rare evaluations. The end is the run's steps, epochs or time limit (`max_time`).

    Example:
        >>> timer = Timer()
        >>> timer.summary()
        {'elapsed': 0.0, 'evaluation': 0.0, 'saving': 0.0, 'training': 0.0}
    """

    order = -100  # before the callbacks that show the log

    def __init__(self) -> None:
        self._spent = dict.fromkeys(_KINDS, 0.0)
        self._began: float | None = None
        self._ended: float | None = None
        self._paused_at = 0.0
        self._first = 0.0  # the completed share of the run at the start or resume

    def summary(self) -> dict[str, float]:
        """Return the seconds since the start or the resume, in all and by activity."""
        if self._began is None:
            elapsed = 0.0
        else:
            elapsed = (time.perf_counter() if self._ended is None else self._ended) - self._began
        return {"elapsed": elapsed, **self._spent, "training": elapsed - sum(self._spent.values())}

    def on_fit_begin(self, run: Run) -> None:
        self._spent = dict.fromkeys(_KINDS, 0.0)
        self._began, self._ended = time.perf_counter(), None
        self._first = _share(run) or 0.0

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        values["elapsed_seconds"] = elapsed = self.summary()["elapsed"]
        share = _share(run)
        if share is not None and share > self._first:
            values["remaining_seconds"] = max(elapsed / (share - self._first) * (1 - share), 0.0)

    def on_fit_end(self, run: Run) -> None:
        self._ended = time.perf_counter()
        run.record_event("timing", **{name: round(seconds, 3) for name, seconds in self.summary().items()})

    def on_evaluate_begin(self, run: Run) -> None:
        self._paused_at = time.perf_counter()

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._count("evaluation")

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self._paused_at = time.perf_counter()

    def on_save_end(self, run: Run, folder: Path) -> None:
        if not getattr(run.args, "save_in_background", False):  # background saves do not pause training
            self._count("saving")

    def _count(self, kind: str) -> None:
        if self._began is not None and self._ended is None:  # also the last checkpoint, after the last update
            self._spent[kind] += time.perf_counter() - self._paused_at


def _share(run: Run) -> float | None:
    """Return the completed share of a run, by its nearest limit; `None` without a limit."""
    state, limit = run.state, getattr(run.args, "time_limit", None)
    shares = list[float]()
    if state.max_steps:
        shares.append(state.step / state.max_steps)
    elif state.max_epochs:
        shares.append(state.epochs / state.max_epochs)
    if limit:
        shares.append(state.seconds / limit)
    return max(shares) if shares else None
