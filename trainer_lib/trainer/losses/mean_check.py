"""A warning where a loss is not a mean over the items of a batch, so that micro-batches do not add up to a batch."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.format.rng_state import preserved_generators
from trainer_lib.foundation.batch_fields import IGNORE_INDEX, as_mapping, label_names_in, targets_of, with_targets
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.trainer.data.batch_rows import count_rows, take_rows
from trainer_lib.trainer.losses.label_shift import asking, device_of, has_token_labels, is_from_transformers
from trainer_lib.trainer.losses.loss_result import LossResult, Weight

_logger = get_logger(__name__)

LossOf = Callable[[Any], Any]
_ROUNDING = 1e-5  # of a loss in full precision
_FEW = 2  # labels that the first of two samples keeps, so that the samples weigh differently


def is_mean_over_items(
    loss_of: LossOf, count: Callable[[Any], Weight], batch: Any, label_names: Sequence[str] | None, masks: bool
) -> bool | None:
    """Whether the loss of two samples is the mean of their losses, each weighted by its number of items.

    Args:
        loss_of: Returns the loss of a batch; called three times.
        count: Returns the number of items of a batch.
        batch: A batch, of which the first two samples are taken.
        label_names: Which names of a batch are targets.
        masks: Whether most token labels of the first sample may be ignored (-100): the two weigh differently then.

    Returns:
        `None` where that cannot be found out: there are fewer samples, they cannot be taken apart, or one of them
        has no loss.

    Example:
        >>> mean = lambda batch: batch.mean()
        >>> is_mean_over_items(mean, len, torch.tensor([1.0, 5.0]), None, masks=False)
        True
        >>> is_mean_over_items(lambda batch: batch.max(), len, torch.tensor([1.0, 5.0]), None, masks=False)
        False
    """
    rows = count_rows(batch)
    if rows is None or rows < 2:
        return None
    try:
        both = take_rows(batch, 0, 2, rows)
        if masks:
            both = _with_few_labels(both, label_names)
        parts = [take_rows(both, 0, 1, 2), take_rows(both, 1, 2, 2)]
        losses = [float(loss_of(part)) for part in (*parts, both)]
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ConfigurationError) as error:
        if is_out_of_memory(error):
            raise
        return None
    first, second, whole = losses
    weights = [float(count(part)) for part in parts]
    if not all(map(math.isfinite, losses)) or not all(weights):
        return None
    expected = (first * weights[0] + second * weights[1]) / sum(weights)
    return math.isclose(whole, expected, rel_tol=_ROUNDING, abs_tol=_ROUNDING * max(abs(first), abs(second)))


class MeanCheck:
    """Warns once, at the first batch of a run whose updates are made of several, if their losses do not add up.

    Only models of transformers are called for it, and loss functions without a state: calls leave no trace there.

    Args:
        bare: The model.
        count: Counts the items of a batch.
        label_names: Which names of a batch are targets.
        is_needed: Whether an update is made of several batches, over ranks or over time.
    """

    def __init__(
        self,
        bare: nn.Module,
        count: Callable[[Any], Weight],
        label_names: Sequence[str] | None,
        is_needed: Callable[[], bool],
    ) -> None:
        self._bare, self._count, self._label_names, self._is_needed = bare, count, label_names, is_needed
        self._is_made = False

    def of_model(self, loss_of: LossOf, batch: Any) -> None:
        """Check the loss that a model returns."""
        if self._is_due() and is_from_transformers(self._bare):
            has_more = bool(_further_labels(batch, self._label_names))
            with asking(self._bare):
                is_mean = not has_more and self._judge(loss_of, self._count, batch, masks=True)
            self._tell(type(self._bare).__name__, is_mean)

    def of_function(
        self, loss_fn: Callable[[Any, Any], Any], name: str, batch: Any, outputs: Any, targets: Any
    ) -> None:
        """Check a loss function by what a model returned for a batch."""
        if self._is_due() and not (isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())):

            def loss_of(part: Any) -> Any:
                loss = loss_fn(part[1], part[2])
                # A LossResult says itself what it is a mean over.
                return math.nan if isinstance(loss, LossResult) else loss

            whole = batch, outputs, targets
            with preserved_generators(device_of(self._bare)), torch.no_grad():
                is_mean = self._judge(loss_of, lambda part: self._count(part[0]), whole, masks=False)
            self._tell(name, is_mean)

    def _is_due(self) -> bool:
        if self._is_made or not torch.is_grad_enabled():
            return False
        self._is_made = True
        return self._is_needed() and all(parameter.dtype is torch.float32 for parameter in self._bare.parameters())

    def _judge(self, loss_of: LossOf, count: Callable[[Any], Weight], batch: Any, masks: bool) -> bool | None:
        with _full_precision():
            return is_mean_over_items(loss_of, count, batch, self._label_names if masks else None, masks)

    def _tell(self, name: str, is_mean: bool | None) -> None:
        if is_mean is False:
            _logger.warning_once(
                f"The loss of {name} is not a mean over the items of a batch: it has several parts, is a sum, or the "
                "samples of a batch influence each other (as in-batch negatives do). So each update is a mean of "
                "means, the weighted mean of the losses of its micro-batches, which is not the loss of one big batch."
            )


def _further_labels(batch: Any, label_names: Sequence[str] | None) -> list[str]:
    """Return the names of labels that nobody counts: what they are compared with is a loss of its own."""
    named = as_mapping(batch) or {}
    counted = label_names_in(named, label_names)
    return [name for name in named if "label" in str(name) and name not in counted]


@contextmanager
def _full_precision() -> Generator[None]:
    """Return the context in which matrices are multiplied without rounding to TF32 or bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _with_few_labels(batch: Any, label_names: Sequence[str] | None) -> Any:
    labels = targets_of(batch, label_names)
    if not has_token_labels(labels):
        return batch
    counts: Tensor = labels != IGNORE_INDEX
    from_behind = counts[0].flip(0).cumsum(0).flip(0)
    few = labels.clone()
    few[0][from_behind > _FEW] = IGNORE_INDEX
    return with_targets(batch, few, label_names)
