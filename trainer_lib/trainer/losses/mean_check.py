"""A warning if a loss is not a mean over the items of a batch, so that micro-batches do not add up to a batch."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import (
    IGNORE_INDEX,
    as_mapping,
    label_names_in,
    targets_of,
    with_targets,
)
from trainer_lib.foundation.tensors.pytree import map_tensors
from trainer_lib.logging import get_logger
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.trainer.data.batch_rows import count_rows, take_rows
from trainer_lib.trainer.losses.loss_result import LossResult, Weight

_logger = get_logger(__name__)

ComputeLoss = Callable[[Any], Any]
_ROUNDING = 1e-5  # rounding error of a loss in fp32
_FEW = 2  # labels that the first of two samples keeps, so that their weights differ
_SAMPLES = 8  # of a batch, to check a loss function with
_BATCHES = 4  # to check it with: its weights of the samples of a batch may happen to be equal

_OF_FUNCTION = (
    "If it is a sum divided by a number, return LossResult(sum, weight=number) from loss_fn, and both are equal. "
    "Otherwise use larger batches instead of accumulation."
)
_OF_MODEL = (
    "If it is a sum divided by a number, override num_items(batch) to return this number, and both are equal. "
    "Otherwise use larger batches instead of accumulation."
)
_SUM_OF_CTC = 'Set model.config.ctc_loss_reduction = "mean", and both are equal.'


def is_mean_over_items(
    loss_of: ComputeLoss,
    count: Callable[[Any], Weight],
    batch: Any,
    label_names: Sequence[str] | None,
    masks: bool,
    samples: int = 2,
) -> bool | None:
    """Whether the loss of the first samples is the mean of that of their halves, weighted by their numbers of items.

    Args:
        loss_of: Returns the loss of a batch; called three times.
        count: Returns the number of items of a batch.
        batch: A batch, of which the first samples are used.
        label_names: The names of a batch that are targets.
        masks: Whether to ignore (-100) most token labels of the first sample, so that the weights differ.
        samples: How many samples are used, at most.

    Returns:
        `None` if it cannot be measured: the batch has fewer samples, cannot be split, or a sample has no loss.

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
        samples = min(samples, rows)
        together = take_rows(batch, 0, samples, rows)
        if masks:
            together = _with_few_labels(together, label_names)
        parts = [take_rows(together, 0, samples // 2, samples), take_rows(together, samples // 2, samples, samples)]
        losses = [float(loss_of(part)) for part in (*parts, together)]
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
    """Warns once, at the first batches, if an update has several micro-batches and their losses do not add up.

    It calls only models of transformers and loss functions, where calls have no side effects: modules are in evaluation
    mode meanwhile, and their buffers are restored.

    Args:
        bare: The model.
        count: Counts the items of a batch.
        label_names: The names of a batch that are targets.
        is_needed: Whether an update has several micro-batches, on several ranks or by accumulation.

    Attributes:
        is_done: Whether it has checked the loss of a model, or that of a function on enough batches.
    """

    def __init__(
        self,
        bare: nn.Module,
        count: Callable[[Any], Weight],
        label_names: Sequence[str] | None,
        is_needed: Callable[[], bool],
    ) -> None:
        self._bare, self._count, self._label_names, self._is_needed = bare, count, label_names, is_needed
        self.is_done: bool = False
        self._batches = 0  # that a loss function was checked with

    def check_model(self, loss_of: ComputeLoss, batch: Any) -> None:
        """Check the loss that a model returns."""
        if not self._is_due():
            return
        from trainer_lib.modules.unwrapping import without_adapter
        from trainer_lib.trainer.losses.label_shift import is_from_transformers, probing
        from trainer_lib.trainer.losses.model_labels import averages_samples

        if is_from_transformers(self._bare):
            has_more = bool(_further_labels(batch, self._label_names))
            with probing(self._bare):
                is_mean = not has_more and self._measure(loss_of, self._count, batch, masks=True)
            self.is_done = True
            remedy = _SUM_OF_CTC if averages_samples(self._bare) else _OF_MODEL
            self._warn(type(without_adapter(self._bare)).__name__, is_mean, remedy)

    def check_function(self, loss_fn: Any, mean: Callable[..., Any], name: str, whole: tuple[Any, Any, Any]) -> None:
        """Check a loss function, which `mean` calls with a batch, a model's outputs for it, and its targets."""
        if self._is_due():

            def loss_of(part: Any) -> Any:
                of_batch, *compared = part
                loss = mean(of_batch, *map_tensors(torch.clone, compared))  # which it may change in place
                # A LossResult has its own weight, so there is nothing to check.
                return math.nan if isinstance(loss, LossResult) else loss

            from trainer_lib.trainer.evaluation.eval_mode import generators_kept
            from trainer_lib.trainer.losses.label_shift import device_of, probing

            as_module = probing(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext()
            with generators_kept(device_of(self._bare), {"loss_fn": loss_fn}), torch.no_grad(), as_module:
                is_mean = self._measure(loss_of, lambda part: self._count(part[0]), whole, False, _SAMPLES)
            self._batches += 1
            self.is_done = self._batches == _BATCHES  # whatever it finds: ranks call a loss that gathers equally often
            self._warn(name, is_mean, _OF_FUNCTION)

    def _is_due(self) -> bool:
        if self.is_done or not torch.is_grad_enabled():
            return False
        is_exact = all(parameter.dtype is torch.float32 for parameter in self._bare.parameters())
        self.is_done = not (is_exact and self._is_needed())
        return not self.is_done

    def _measure(
        self, loss_of: ComputeLoss, count: Callable[[Any], Weight], batch: Any, masks: bool, samples: int = 2
    ) -> bool | None:
        with _full_precision():
            return is_mean_over_items(loss_of, count, batch, self._label_names if masks else None, masks, samples)

    def _warn(self, name: str, is_mean: bool | None, remedy: str) -> None:
        if is_mean is False:
            _logger.warning_once(
                f"The loss of {name} is not a mean over the items of a batch, which num_items counts: it has several "
                "parts, is a sum, a mean over other items (such as values that are not masked, or weights of classes), "
                "or the samples of a batch influence each other (as in-batch negatives do). An update then uses the "
                "weighted mean of the losses of its micro-batches, which differs from the loss of one big batch. "
                f"{remedy}"
            )


def _further_labels(batch: Any, label_names: Sequence[str] | None) -> list[str]:
    """Return the names of labels that are not counted as items: they belong to a further loss."""
    named = as_mapping(batch) or {}
    counted = label_names_in(named, label_names)
    return [name for name in named if "label" in str(name) and name not in counted]


@contextmanager
def _full_precision() -> Generator[None]:
    """Return a context in which matrix products are not rounded to TF32 or bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _with_few_labels(batch: Any, label_names: Sequence[str] | None) -> Any:
    from trainer_lib.trainer.losses.label_shift import has_token_labels

    labels = targets_of(batch, label_names)
    if not has_token_labels(labels):
        return batch
    counts: Tensor = labels != IGNORE_INDEX
    remaining = counts[0].flip(0).cumsum(0).flip(0)
    few = labels.clone()
    few[0][remaining > _FEW] = IGNORE_INDEX
    return with_targets(batch, few, label_names)
