"""Logging of a fit: the means since the last log, with what ranks found out meanwhile."""

import math
from collections.abc import Mapping

import torch

from trainer_lib.logging import get_logger
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.train_clock import TrainClock
from trainer_lib.trainer.losses.loss_checks import check_result
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.safety.bad_samples import BadSamples
from trainer_lib.trainer.safety.micro_batching import MicroBatching
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard

_logger = get_logger(__name__)


class TrainLog:
    """Records training steps, and logs their means.

    Args:
        context: The fit.
        clock: Counts the time of training.
        guard: The guard of the updates, which reports what it skipped on a device.
        bad_samples: The samples that this rank skipped.
        micro_batching: How many rows fit into the memory of this rank.
    """

    def __init__(
        self,
        context: FitContext,
        clock: TrainClock,
        guard: NonFiniteGuard,
        bad_samples: BadSamples,
        micro_batching: MicroBatching,
    ) -> None:
        self._context, self._run, self._means = context, context.run, context.means
        self._clock, self._guard = clock, guard
        self._bad_samples, self._micro_batching = bad_samples, micro_batching

    def record(self, result: LossResult | None) -> None:
        """Keep what a training step returned, until a log or a callback asks for it."""
        if result is None:  # the step logs for itself
            return
        if type(result) is not LossResult or result.weight is None:
            check_result(result)
        run, means, weight = self._run, self._means, result.weight
        loss = result.loss
        run.loss_sum = loss = loss.detach() if loss.requires_grad else loss
        run.weight = weight  # type: ignore[assignment]  # it has one by now
        means.add_sum("loss", loss, run.weight)
        if result.logs is not None:
            means.add_all(result.logs, run.weight)
        run.outputs = result.outputs

    def log(self) -> None:
        """Log the means since the last log."""
        run, state, means = self._run, self._run.state, self._means
        self.flush()
        self.sync_findings()
        values = means.collect()
        state.items += means.items
        if "loss" in means.weightless:
            _logger.warning_once(
                "Nothing in the batches since the last log counts for the loss, so that nothing is learned from them: "
                "all labels are ignored (-100), or num_items and weight are 0."
            )
        if not values:  # nothing since the last time
            return
        values |= self._grad_norm()
        try:
            self._context.events.fire("on_log", run, values)
        finally:  # a callback that raises does not lose them: they are no longer in the means
            state.history.append({"step": state.step, "epoch": state.epochs, **values})

    def flush(self) -> None:
        """Count the time so far, and report the updates that were skipped on a device."""
        self._clock.add()
        self._guard.flush()

    def sync_findings(self) -> None:
        """Synchronize across ranks what each rank found out: bad samples, and how many rows fit into memory."""
        self._bad_samples.agree()
        self._micro_batching.sync_across_ranks()

    def state_dict(self) -> dict[str, float]:
        """Return the norm of the last gradients, which the next log reports if no update comes before it."""
        return self._grad_norm()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load what `state_dict` returned; checkpoints of earlier versions lack it."""
        if "grad_norm" in state:
            self._run.grad_norm = torch.tensor(state["grad_norm"], dtype=torch.float64)

    def _grad_norm(self) -> dict[str, float]:
        """Return the norm of the last gradients, if there is one; of ranks that train by themselves, the mean."""
        norms = [None if self._run.grad_norm is None else float(self._run.grad_norm)]
        if self._run.args.local_sgd_steps is not None:
            norms = self._context.group.all_gather_objects(norms[0])
        known = [norm for norm in norms if norm is not None]
        return {"grad_norm": math.fsum(known) / len(known)} if known else {}
