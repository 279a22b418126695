"""This file is how fast training goes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainer_lib.events import Callback, Run


class Throughput(Callback):
    """Adds samples and steps a second to what is logged: since the last log, without evaluations and saving.

    Beside them `data_wait` is the share of that time in which training waited for batches.

    It does nothing in a step, so that it costs nothing there (with `tokens`: one call a batch).

    Args:
        tokens: A function of a batch that returns how many tokens are in it: a number or a tensor. Those of this
            process are counted, and taken times the number of processes.
        per_device: Whether to add samples a second of each device too.

    Example:
        >>> throughput = Throughput(tokens=lambda batch: batch["attention_mask"].sum())
        >>> throughput.summary()
        {'steps': 0, 'samples': 0, 'seconds': 0.0, 'evaluation_seconds': 0.0, 'saving_seconds': 0.0, 'tokens': 0.0}
    """

    order = -100  # before those who show what is logged

    def __init__(self, tokens: Callable[[Any], float | Tensor] | None = None, per_device: bool = False) -> None:
        self._tokens_of, self._per_device = tokens, per_device
        self._tokens: float | Tensor = 0
        self._processes = 1
        self._loader: Any = None  # that is trained from
        self._waited: float | None = None  # for batches; not known without a loader of the library's
        self._pauses = {"evaluation_seconds": 0.0, "saving_seconds": 0.0}
        self._paused_at = 0.0
        self._is_training = False
        self._first = self._last = self._now = _Place()
        if tokens is not None:
            self.on_micro_batch_end = self._count_tokens

    def summary(self) -> dict[str, float]:
        """Return the totals since training began, or went on, up to now or its end."""
        totals: dict[str, float] = {
            "steps": self._now.steps - self._first.steps,
            "samples": self._now.samples - self._first.samples,
            "seconds": self._now.seconds - self._first.seconds,
            **self._pauses,
        }
        if self._tokens_of is not None:
            totals["tokens"] = self._now.tokens - self._first.tokens
        return totals | self._speeds(self._first)

    def on_fit_begin(self, run: Run) -> None:
        self._pauses = dict.fromkeys(self._pauses, 0.0)
        self._processes = 1 if run.accelerator is None else run.accelerator.num_processes
        self._tokens = 0
        self._loader = self._waited = None
        self._first = self._last = self._now = self._place(run)
        self._is_training = True

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._now = self._place(run)
        values.update(self._speeds(self._last))
        self._last = self._now

    def on_fit_end(self, run: Run) -> None:
        self._now = self._place(run)
        self._is_training = False

    def on_evaluate_begin(self, run: Run) -> None:
        self._paused_at = time.perf_counter()

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._go_on("evaluation_seconds")

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self._paused_at = time.perf_counter()

    def on_save_end(self, run: Run, folder: Path) -> None:
        self._go_on("saving_seconds")

    def _go_on(self, after: str) -> None:
        if self._is_training:
            self._pauses[after] += time.perf_counter() - self._paused_at

    def _count_tokens(self, run: Run) -> None:
        assert self._tokens_of is not None
        # A tensor stays on its device until it is logged.
        self._tokens = self._tokens + self._tokens_of(run.batch)

    def _place(self, run: Run) -> "_Place":
        seconds = time.perf_counter() - sum(self._pauses.values())
        if run.accelerator is not None:  # after the last step, the loader is that of before
            active = run.accelerator.gradient_state.active_dataloader
            self._loader = self._loader if active is None else active  # which may have no length, and so no truth
        self._waited = getattr(self._loader, "seconds_waited", self._waited)
        tokens = float(self._tokens) * self._processes
        return _Place(run.state.step, run.state.samples, seconds, tokens, self._waited or 0.0)

    def _speeds(self, since: "_Place") -> dict[str, float]:
        now, seconds = self._now, self._now.seconds - since.seconds
        if now.steps == since.steps or seconds <= 0:
            return {}
        speeds = {
            "samples_per_second": (now.samples - since.samples) / seconds,
            "steps_per_second": (now.steps - since.steps) / seconds,
        }
        if self._tokens_of is not None:
            speeds["tokens_per_second"] = (now.tokens - since.tokens) / seconds
        if self._waited is not None:
            speeds["data_wait"] = min((now.waited - since.waited) / seconds, 1.0)
        if self._per_device:
            speeds["samples_per_second_per_device"] = speeds["samples_per_second"] / self._processes
        return speeds


class _Place(NamedTuple):
    """How far training is; the seconds are those of a clock that stands still in pauses."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    waited: float = 0.0
