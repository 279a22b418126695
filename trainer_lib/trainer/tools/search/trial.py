"""One trial of a search: a run of the trainer's own loop with other arguments, after which all state is restored."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import NoExecutableBatchSizeError, NonFiniteError, TrainerLibError
from trainer_lib.foundation.metric_names import read_metric
from trainer_lib.memory.executable_batch_size import free_memory_of
from trainer_lib.trainer import defaults
from trainer_lib.trainer.tools.sandbox import copy_callbacks, sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

TOOL = "search"
FOLDER = "search"  # in output_dir, so that resume does not find the trials


class Study(Protocol):
    """The backend's trial, to which evaluations are reported and which may prune it."""

    def report(self, value: float, step: int) -> None:
        """Note the metric of an evaluation."""
        ...

    def should_prune(self) -> bool:
        """Whether the trial is not worth its time."""
        ...


class Trial:
    """One trial.

    Args:
        trainer: The trainer.
        number: The number of the trial.
        params: The arguments to train with.
        reporting: The callback that reports evaluations to the study.

    Attributes:
        value: The metric of its last evaluation; `None` before the first.
        failure: Why it failed; `None` if it did not.
        is_interrupted: Whether a signal or a deadline ended it.
    """

    def __init__(
        self, trainer: TrainerInterface, number: int, params: Mapping[str, Any], reporting: "Reporting"
    ) -> None:
        self._trainer, self._number, self._params, self._reporting = trainer, number, params, reporting
        self.value: float | None = None
        self.failure: str | None = None
        self.is_interrupted = False

    @property
    def is_pruned(self) -> bool:
        """Whether the study pruned it, known on the main process."""
        return self._reporting.is_pruned

    def train(self, is_more: bool) -> None:
        """Train from the trainer's current state, and restore that state."""
        trainer, root = self._trainer, self._trainer.args.output_folder
        of_search = {
            "output_dir": None if root is None else str(root / FOLDER),
            "run_name": f"trial-{self._number}",
            "resume": "never",
            "metric_for_best": self._reporting.metric,
            "greater_is_better": is_more,
        }
        args = dataclasses.replace(trainer.args, **{**self._params, **of_search})
        kept = [callback for callback in trainer.events if not (callback.is_display or callback.writes_history)]
        callbacks = defaults.callbacks(args, copy_callbacks(trainer, TOOL, kept))
        listening = [callback for callback in callbacks if not callback.is_display]
        try:
            with sandbox(trainer, TOOL, args, [*listening, self._reporting]):
                trainer.fit()
                self._note(trainer.run)
        except Exception as error:
            if not self._is_survived(error):
                raise
            self.failure = f"{type(error).__name__}: {error}"
            free_memory_of(error)

    def _note(self, run: Run) -> None:
        self.is_interrupted: bool = run.state.status == "interrupted"
        if self.is_interrupted:
            self.failure = f"interrupted: {run.state.reason}"
            return
        self.value = self._reporting.read(run.metrics)
        if not math.isfinite(self.value) and not self.is_pruned:
            self.failure = f"{self._reporting.metric} is {self.value}"

    def _is_survived(self, error: Exception) -> bool:
        """Whether the search continues: not after a wrong setup, nor if the other ranks may wait for this one."""
        if isinstance(error, NonFiniteError):  # raised on all ranks together
            return True
        is_of_trial = isinstance(error, NoExecutableBatchSizeError) or not isinstance(error, TrainerLibError)
        return is_of_trial and not self._trainer.accelerator.use_distributed


class Reporting(Callback):
    """Reports each evaluation to the study, and ends the trial if the study prunes it."""

    metric: str
    is_pruned: bool

    order = 1000  # after callbacks that add metrics

    def __init__(self, metric: str, asked: Study | None) -> None:
        self.metric, self._asked = metric, asked  # on the main process only
        self.is_pruned = False

    def read(self, metrics: Mapping[str, float]) -> float:
        """Return the metric that the search optimizes."""
        return read_metric(self.metric, metrics, f"search(metric={self.metric!r})")

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Report the metric, and end the trial if the study says so."""
        if run.leaves_out(self.metric):
            return
        value = self.read(metrics)
        if self._asked is None or run.state.status != "running":
            return
        self._asked.report(value, run.state.step)
        if self._asked.should_prune():
            self.is_pruned = run.control.stop = True
            run.control.reason = f"the trial was pruned at {self.metric} = {value:.6g}"
