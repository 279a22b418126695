"""Evaluations between the steps of a fit: of the sets that are due, with the best so far."""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from trainer_lib.events import Best
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.logging import get_logger
from trainer_lib.trainer.evaluation.eval_sets import ChosenSets
from trainer_lib.trainer.evaluation.interrupted_eval import EvalInterruption, EvaluationInterrupted
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.train_clock import TrainClock
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.optim.schedules import is_metric_driven
from trainer_lib.trainer.safety.deadline import Deadline

_logger = get_logger(__name__)


@frozen_dataclass
class Evaluated:
    """The sets evaluated at a step, and their metrics."""

    step: int = -1
    sets: frozenset[str] = frozenset()
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class FitEvaluations:
    """Evaluates during a fit. Each method returns whether the evaluation ran to its end, on all ranks.

    Args:
        context: The fit.
        evaluate: The trainer's `evaluate`.
        log: Reports what belongs to the steps so far.
        clock: Counts the time of training.
        deadline: When the run has to end.

    Attributes:
        last: The sets of the last step with an evaluation, and their metrics.
        states_before: The states of callbacks before an evaluation that did not end. They are saved instead of those
            after a part of it, as the resumed run evaluates again.
    """

    def __init__(
        self,
        context: FitContext,
        evaluate: Callable[..., dict[str, float]],
        log: TrainLog,
        clock: TrainClock,
        deadline: Deadline,
    ) -> None:
        self._context, self._run, self._plan, self._evaluate = context, context.run, context.evaluation, evaluate
        self._log, self._clock, self._deadline = log, clock, deadline
        self._schedulers = [scheduler for scheduler in self._run.schedulers.values() if is_metric_driven(scheduler)]
        self.last = Evaluated()
        self.states_before: dict[str, Any] = {}
        if self._schedulers and self._plan.interval is None:
            _logger.warning(
                "%s lowers the learning rate by the metric of evaluations, and there are none during training, so the "
                "rate never changes. Give Trainer(eval_dataset=…) and TrainingArguments(eval_every=…), or call its "
                "step(metric) in a callback.",
                type(self._schedulers[0].scheduler).__name__,
            )

    @property
    def metrics_of_step(self) -> dict[str, float]:
        """The metrics of the step that the run is at; empty without an evaluation of it."""
        return dict(self.last.metrics) if self.last.step == self._run.state.step else {}

    @property
    def is_done(self) -> bool:
        """Whether the sets that were asked for at this step are evaluated, so that an error came after that."""
        if self.last.step != self._run.state.step:
            return False
        control = self._run.control
        return self.last.sets >= self._plan.sets.keys() if control.is_due("evaluate") else not control.sets_due

    def evaluate_due(self, is_last: bool) -> bool:
        """Evaluate all sets, or those whose intervals are over.

        Args:
            is_last: Whether the run ends with this step, so that all sets with intervals are due.
        """
        control = self._run.control
        if control.is_due("evaluate"):
            return self.evaluate()
        # Intervals of time go by the clock of the main process.
        (due,) = self._context.group.broadcast_objects([sorted(control.sets_due)])
        return self.evaluate(self._plan.at_intervals if is_last else due)

    def evaluate_rest(self) -> bool:
        """Evaluate the sets with intervals that the last step did not evaluate."""
        wanted, is_same = self._plan.at_intervals, self.last.step == self._run.state.step
        rest = [name for name in wanted if not (is_same and name in self.last.sets)]
        # The mean over sets is computed where one evaluation takes all of them.
        return not rest or self.evaluate(wanted if self._plan.averaged_metrics else rest)

    def evaluate(self, names: Collection[str] | None = None) -> bool:
        """Evaluate, and see whether it is the best so far.

        Args:
            names: The sets, by name; `None`: all.
        """
        run, sets = self._run, self._plan.sets
        run.eval_sets = {name: names is None or name in names for name in sets}
        try:
            return not any(run.eval_sets.values()) or self._evaluated(ChosenSets(sets))
        finally:
            run.eval_sets = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluation."""
        return {**vars(self.last), "sets": sorted(self.last.sets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; checkpoints of earlier versions lack it."""
        if state:
            self.last = Evaluated(state["step"], frozenset(state["sets"]), dict(state["metrics"]))
            self._run.metrics = self.last.metrics

    def _evaluated(self, sets: ChosenSets) -> bool:
        run, state = self._run, self._run.state
        chosen = ChosenSets((name, data) for name, data in sets.items() if run.eval_sets[name])
        self._log.flush()
        run.control.leaves = self._interruption()
        began = time.monotonic()
        try:
            with self._undone_on_error():
                metrics = self._evaluate() if all(run.eval_sets.values()) else self._evaluate(chosen)
        except EvaluationInterrupted:
            return False
        finally:
            run.control.leaves = None
            self._clock.restart()  # evaluation does not count as time of training
        self._deadline.end_evaluation(time.monotonic() - began)
        self._note(chosen, metrics)
        state.history.append({"step": state.step, "epoch": state.epochs, **metrics})
        self._compare(metrics)
        return True

    @contextmanager
    def _undone_on_error(self) -> Generator[None]:
        """Return the context of an evaluation: what it adds to logs and callbacks is not saved unless it ends."""
        context = self._context
        before = {} if context.folder is None else context.events.states_before_evaluation()
        logged = context.means.mark()
        try:
            yield
        except BaseException:
            self.states_before = before
            context.means.go_back(logged)
            raise

    def _note(self, names: Iterable[str], metrics: Mapping[str, float]) -> None:
        run = self._run
        before = self.last if self.last.step == run.state.step else Evaluated()
        self.last: Evaluated = Evaluated(run.state.step, before.sets | {*names}, {**before.metrics, **metrics})
        run.metrics = self.last.metrics
        run.control.sets_due -= self.last.sets

    def _compare(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow the metric, and see whether it is the best so far."""
        run, name = self._run, self._plan.best_metric
        if name is None:
            return
        if not metrics:
            from trainer_lib.trainer.evaluation.eval_loop import NOTHING_MEASURED

            raise ConfigurationError(f"{NOTHING_MEASURED} To train without evaluations leave eval_dataset out.")
        if run.leaves_out(name):
            return
        if name not in metrics:
            raise ConfigurationError(
                f"metric_for_best={name!r} is not a metric of this evaluation. Known: {', '.join(metrics)}."
                f"{did_you_mean(name, metrics)}"
            )
        for scheduler in self._schedulers:
            scheduler.scheduler.step(metrics[name])
        if math.isfinite(metrics[name]) and self._plan.is_better(metrics[name], run.state.best):
            run.state.best = Best(name, metrics[name], run.state.step)
            self._context.events.fire("on_best", run, name, metrics[name])

    def _interruption(self) -> EvalInterruption:
        context, accelerator = self._context, self._context.accelerator
        in_lockstep, look = accelerator.strategy.is_in_lockstep, self._deadline.look
        return EvalInterruption(self._run.control, context.group, accelerator.device, in_lockstep, look)
