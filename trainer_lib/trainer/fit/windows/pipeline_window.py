"""The micro-batches of a window, which a pipeline computes together with the last of them."""

from typing import Any

from torch import nn

from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.logging import get_logger
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.losses.batch_parts import BatchParts
from trainer_lib.trainer.losses.loss_result import LossResult

_logger = get_logger(__name__)
_SEEING_EACH = ("on_loss", "on_micro_batch_end")  # events with the loss, outputs or gradients of one micro-batch


class PipelineWindow:
    """Collects the micro-batches of a window, and computes them in the schedule of a pipeline.

    Args:
        context: The fit.
        parts: What this rank computes of each batch.

    Attributes:
        is_on: Whether the model takes windows, and nothing needs each micro-batch by itself.
    """

    def __init__(self, context: FitContext, parts: BatchParts) -> None:
        self._context, self._parts, self._batches = context, parts, list[tuple[Any, bool]]()
        model = context.run.model
        takes = isinstance(model, nn.Module) and context.accelerator.takes_windows(model)
        reason = self._reason_against() if takes else ""
        self.is_on: bool = takes and not reason
        if reason:
            _logger.warning_once(
                "The stages of the pipeline do not overlap: %s. Leave it out, or give "
                "TorchPipelineParallelConfig(schedule=None).",
                reason,
            )

    def add(self, batch: Any, counts: bool) -> None:
        """Add a micro-batch; one that does not count is needed only where others compute with this rank's shards."""
        if counts or self._context.accelerator.state.is_fsdp2:
            self._batches.append((batch, counts))

    def compute(self, model: Any) -> LossResult | None:
        """Compute the gradients of the window; return its loss, or `None` if nothing counts."""
        batches, self._batches = self._batches, []
        parts, around = self._parts.of_window(model, [batch for batch, _ in batches])
        counted = [(part, counts) for part, (_, counts) in zip(parts, batches, strict=True)]
        losses = self._context.accelerator.backward_window(
            model, lambda batch: self._loss(model, *batch), counted, around
        )
        if not losses:
            return None
        for loss in losses:
            self._context.means.add_all(loss.facts, loss.weight)
        first, *others = losses
        return LossResult(
            sum((other.loss for other in others), start=first.loss),
            sum((other.weight for other in others), start=first.weight),
        )

    def _loss(self, model: Any, batch: Any, counts: bool) -> WeightedLoss:
        result = self._context.loss.computed(model, batch)
        if not counts:
            return WeightedLoss(result.loss * 0, 0.0)
        weight = 0.0 if result.weight is None else result.weight  # which `computed` has set
        return WeightedLoss(result.loss, weight, result.logs and dict(result.logs))

    def _reason_against(self) -> str:
        if self._context.has_own_step:
            return "your training_step computes each micro-batch by itself"
        handlers = self._context.events.handlers
        names = sorted({type(callback).__name__ for event in _SEEING_EACH for callback, _ in handlers.get(event, ())})
        return f"{', '.join(names)} needs each micro-batch by itself" if names else ""
