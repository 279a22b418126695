"""Saving checkpoints at an interval and at the best metric, and deleting old ones (retention)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.events import Callback, Run
from trainer_lib.events.trigger import callback_trigger
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import greater_is_better_for, read_metric


class Checkpoint(Callback):
    """Saves a checkpoint when the metric is the best so far, and deletes old checkpoints after each save.

    It keeps the newest checkpoints, the best ones, and those at an interval. The newest and the best of all are never
    deleted. It deletes only checkpoints of this run, in the folder of the one just written.

    Args:
        every: An interval to save at, in addition to the trainer's `save_every`, such as "30 minutes".
        keep_last: The number of newest checkpoints to keep; `None` keeps all.
        keep_best: The number of best checkpoints to keep; with 0 a new best metric does not save a checkpoint.
        metric: The metric to compare; `None` uses the trainer's `metric_for_best`.
        greater_is_better: Whether higher values of `metric` are better; `None` infers it from the metric's name.
        keep_every: An interval at which checkpoints are kept permanently, such as "1000 steps": of the saved ones, the
            first at or after each multiple.

    Example:
        >>> checkpoint = Checkpoint(every="30 minutes", keep_last=2, keep_best=3, metric="eval_accuracy")
    """

    keep_best: int
    keep_last: int | None
    metric: str | None
    on_epoch_end: Any
    on_step_end: Any

    saves_checkpoints: ClassVar[bool] = True
    exclusive_group: ClassVar[str | None] = "decide which checkpoints are kept"
    runs_on_all_ranks: ClassVar[bool] = True  # they save together

    def __init__(
        self,
        every: Any = None,
        keep_last: int | None = 3,
        keep_best: int = 1,
        metric: str | None = None,
        greater_is_better: bool | None = None,
        keep_every: Any = None,
    ) -> None:
        _check_number("keep_last", keep_last, least=1, may_be_none=True)
        _check_number("keep_best", keep_best, least=0)
        if keep_every is not None and keep_last is None:
            raise ConfigurationError(
                f"keep_every={keep_every!r} has no effect: keep_last=None keeps all checkpoints. Give keep_last a "
                "number, or leave keep_every out."
            )
        self.keep_last, self.keep_best = keep_last, keep_best
        self.keep_every: Every | None = None if keep_every is None else Every.parse(keep_every, "keep_every")
        if self.keep_every is not None and self.keep_every.unit == "tokens":
            raise ConfigurationError(
                f'keep_every="{self.keep_every}" is not supported. Use steps, epochs, samples or a time.'
            )
        self.metric, self._greater_is_better = metric, greater_is_better
        self._best: float | None = None  # of `metric`; the trainer tracks its own metric
        if metric is not None:
            greater_is_better_for(metric, greater_is_better)  # raises if the direction is unknown
        self.every: Every | None = None if every is None else Every.parse(every, "every")
        if every is not None:
            self._interval = callback_trigger(every, "every")
            self.on_step_end = self.on_epoch_end = self._ask_when_due
        if metric is not None and keep_best:
            self.on_evaluate_end: Any = self._ask_when_best

    @property
    def monitored_metric(self) -> str | None:
        return self.metric

    @property
    def save_interval(self) -> Every | None:
        return self.every

    def on_best(self, run: Run, metric: str, value: float) -> None:
        # With a `metric` given, `_ask_when_best` asks.
        if self.metric is None and self.keep_best > 0:
            run.control.save = True
            run.control.save_reasons.add("best")

    def on_fit_begin(self, run: Run) -> None:
        if self.every is not None:
            self._interval.begin(run.state)
        if not run.state.step:  # no resumed run: the object may have been part of another run
            self._best = None
        if run.state.checkpoints:  # a run that was killed after its last save has not deleted the older ones
            self._delete_expired(run, path_at(run.state.checkpoints[-1]["path"]))

    def on_save_end(self, run: Run, folder: Path) -> None:
        self._delete_expired(run, folder)

    def state_dict(self) -> dict[str, Any]:
        # None too: a rewind to before the first evaluation begins again without a best value.
        return {} if self.metric is None else {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]

    def _delete_expired(self, run: Run, newest: AnyPath) -> None:
        from trainer_lib.checkpointing.save.retention import delete_older

        checkpoints = run.state.checkpoints
        kept = self._steps_kept(run)
        run.state.checkpoints = [entry for entry in checkpoints if entry["step"] in kept]
        if run.is_main_process:
            expired = [path_at(entry["path"]) for entry in checkpoints if entry["step"] not in kept]
            delete_older(expired, newest, run.state.run_id)

    def _ask_when_due(self, run: Run) -> None:
        if not self._interval.is_due(run.state):
            return
        run.control.save_reasons.add("interval")
        if not self._interval.is_timed:
            run.control.agree("save")  # all ranks count alike
        elif run.is_main_process:
            run.control.save = True  # clocks differ between ranks: rank 0 decides

    def _ask_when_best(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status != "running" or self.metric is None or run.leaves_out(self.metric):
            return
        value = read_metric(self.metric, metrics, "Checkpoint")
        if math.isfinite(value) and (self._best is None or self._sign(run) * (value - self._best) > 0):
            self._best = value
            run.control.save = True
            run.control.save_reasons.add("best")

    def _steps_kept(self, run: Run) -> set[int]:
        from trainer_lib.checkpointing.save.retention import steps_to_keep

        best = set() if run.state.best is None else {run.state.best.step}
        metric = self._metric(run)
        is_greater_better = metric is not None and self._sign(run) > 0
        return best | steps_to_keep(
            run.state.checkpoints, self.keep_last, self.keep_best, self.keep_every, metric, is_greater_better
        )

    def _metric(self, run: Run) -> str | None:
        if self.metric is not None:
            return self.metric
        return None if run.state.best is None else run.state.best.metric

    def _sign(self, run: Run) -> int:
        is_greater_better = self._greater_is_better
        if is_greater_better is None and self.metric is None:
            is_greater_better = getattr(run.args, "greater_is_better", None)
        return 1 if greater_is_better_for(self._metric(run) or "", is_greater_better) else -1


def _check_number(name: str, value: Any, least: int, may_be_none: bool = False) -> None:
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        or_none = ", or None to keep all" if may_be_none else ""
        raise ConfigurationError(
            f"{name} must be a number of checkpoints (got {shown(value)}). Give {least} or more{or_none}."
        )
