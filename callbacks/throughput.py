"""Training speed in the log: samples, steps and tokens per second."""

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from trainer_lib.events import Callback, Run


class Throughput(Callback):
    """Adds samples and steps per second to the log, since the last log and without evaluations and saving.

    `data_wait` is the share of that time in which training waited for batches. For a checkpoint that is written in the
    background, only the time that training waits for it is excluded. The callback does nothing in a step (with
    `tokens`: one call per batch).

    Args:
        tokens: A function of a batch that returns its number of tokens, as a number or a tensor. The tokens of this
            rank are counted, and multiplied by the world size.
        per_device: Whether to add samples per second per device.
        fill: Whether to add the share of positions in the batches that are not padding (`attention_mask`).

    Example:
        >>> throughput = Throughput(tokens=lambda batch: batch["attention_mask"].sum())
        >>> throughput.summary()
        {'steps': 0, 'samples': 0, 'seconds': 0.0, 'evaluation_seconds': 0.0, 'saving_seconds': 0.0, 'tokens': 0.0}
    """

    order = -100  # before the callbacks that show the log
    reads_outputs: ClassVar[bool] = False

    def __init__(
        self, tokens: Callable[[Any], float | Tensor] | None = None, per_device: bool = False, fill: bool = False
    ) -> None:
        self._tokens_of, self._per_device, self._shows_fill = tokens, per_device, fill
        self._tokens: float | Tensor = 0
        self._devices = self._ranks = 1
        self._loader: Any = None  # the training loader
        self._waited: float | None = None  # for batches; None for a foreign loader
        self._pauses = {"evaluation_seconds": 0.0, "saving_seconds": 0.0}
        self._paused_at = 0.0
        self._saved_before = 0.0  # seconds of saving before this fit
        self._is_training = False
        self._first = self._last = self._now = _Progress()
        if tokens is not None or fill:
            self.on_micro_batch_end: Any = self._count

    def summary(self) -> dict[str, float]:
        """Return the totals since the start or the resume, up to now or the end of training."""
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
        self._pauses, self._saved_before = dict.fromkeys(self._pauses, 0.0), run.saving_seconds
        if run.accelerator is not None:
            self._devices, self._ranks = run.accelerator.num_processes, run.accelerator.data_group.size
        self._tokens = 0
        self._loader = self._waited = None
        self._first = self._last = self._now = self._measure(run)
        self._is_training = True

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._now = self._measure(run)
        values.update(self._speeds(self._last))
        self._last = self._now

    def on_fit_end(self, run: Run) -> None:
        self._now = self._measure(run)
        self._is_training = False

    def on_evaluate_begin(self, run: Run) -> None:
        self._paused_at = time.perf_counter()

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._is_training:
            self._pauses["evaluation_seconds"] += time.perf_counter() - self._paused_at

    def _count(self, run: Run) -> None:
        # A tensor stays on its device until it is logged.
        if self._tokens_of is not None:
            self._tokens = self._tokens + self._tokens_of(run.batch)
        mask = run.batch.get("attention_mask") if self._shows_fill and isinstance(run.batch, Mapping) else None
        if isinstance(mask, Tensor):
            # Not in this callback: a resumed run continues the mean.
            run.trainer.parts.means.add_sum("fill", mask.count_nonzero(), mask.numel())

    def _measure(self, run: Run) -> "_Progress":
        self._pauses["saving_seconds"] = run.saving_seconds - self._saved_before
        seconds = time.perf_counter() - sum(self._pauses.values())
        if run.accelerator is not None:  # after the last step no loader is active
            active = run.accelerator.gradient_state.active_dataloader
            self._loader = self._loader if active is None else active  # not `or`: a loader without length has no bool
        self._waited = getattr(self._loader, "seconds_waited", self._waited)
        tokens = float(self._tokens) * self._ranks
        return _Progress(run.state.step, run.state.samples, seconds, tokens, self._waited or 0.0)

    def _speeds(self, since: "_Progress") -> dict[str, float]:
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
            speeds["samples_per_second_per_device"] = speeds["samples_per_second"] / self._devices
        return speeds


class _Progress(NamedTuple):
    """Progress of training; the clock behind `seconds` stops during pauses."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    waited: float = 0.0
