"""The loss of a batch as a sum with its weight, whatever the model, a loss function or `compute_loss` returns."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.events import Dispatcher, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import SHIFTED_LABELS, as_mapping
from trainer_lib.logging import get_logger
from trainer_lib.state.accumulation_window import sum_from_mean
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.data.batch_rows import count_rows
from trainer_lib.trainer.losses.loss_checks import check_loss, check_weight
from trainer_lib.trainer.losses.loss_result import LossResult, Weight, count_valid, ignored_label
from trainer_lib.trainer.losses.mean_check import MeanCheck
from trainer_lib.trainer.losses.model_io import is_scalar, targets_of
from trainer_lib.trainer.losses.objectives import LossFunction, ModelLoss, Objective
from trainer_lib.trainer.overridable import is_overridden

if TYPE_CHECKING:
    from trainer_lib.trainer.losses.label_shift import LabelShift

_logger = get_logger(__name__)


class LossMethods(Protocol):
    """What a trainer says about its loss."""

    model: nn.Module | Mapping[str, nn.Module]
    args: TrainingArguments
    accelerator: Accelerator
    events: Dispatcher
    run: Run
    loss_fn: Callable[[Any, Any], Any] | None

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model."""
        ...

    @functools.cached_property
    def label_shift(self) -> "LabelShift":
        """Whether the model compares each position with the label of the next."""
        ...

    def compute_loss(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch: a mean, `(mean, outputs)`, or a `LossResult`."""
        ...

    def num_items(self, batch: Any) -> Weight:
        """Return the number of items in the mean loss of a batch."""
        ...


class BatchLoss:
    """The loss of a batch.

    Args:
        trainer: The methods and the model that compute it.
    """

    def __init__(self, trainer: LossMethods) -> None:
        self._trainer = trainer
        self._objective: Objective | None = None
        self._has_checked = False

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass overrides `compute_loss`."""
        return is_overridden(type(self._trainer), "compute_loss")

    @functools.cached_property
    def ignored_label(self) -> int:
        """The label that losses and metrics leave out."""
        if self._trainer.loss_fn is not None:
            return ignored_label(self._trainer.loss_fn)
        from trainer_lib.trainer.losses.model_labels import label_ignored_by

        return label_ignored_by(self._trainer.unwrapped_model)

    @functools.cached_property
    def counted_names(self) -> Sequence[str] | None:
        """The names of the targets that are counted as items: of several, "labels", as in Hugging Face's Trainer."""
        names = self._trainer.args.label_names
        return ["labels"] if names and "labels" in names else names

    @functools.cached_property
    def _labels_of_model(self) -> list[str]:
        """The names of labels that a model of transformers takes; none if the arguments name them."""
        args, model = self._trainer.args, self._trainer.model
        if args.label_names is not None or not isinstance(model, nn.Module):
            return []
        from trainer_lib.trainer.losses.model_labels import labels_taken_by

        return labels_taken_by(model)

    def labels(self, batch: Any) -> Any:
        """Return the labels that metrics get, by name if there are several; `None` without labels."""
        of_model = targets_of(batch, self._labels_of_model) if self._labels_of_model else None
        return targets_of(batch, self._trainer.args.label_names) if of_model is None else of_model

    @functools.cached_property
    def averages_samples(self) -> bool:
        """Whether each sample counts alike in the loss, however many labels it has."""
        if self._trainer.loss_fn is not None:
            return False
        from trainer_lib.trainer.losses.model_labels import averages_samples

        return averages_samples(self._trainer.unwrapped_model)

    @functools.cached_property
    def averages_boxes(self) -> bool:
        """Whether the loss is a sum divided by the number of boxes in the batch of this rank."""
        if self._trainer.loss_fn is not None:
            return False
        from trainer_lib.trainer.losses.model_labels import averages_boxes, reduces_counts

        bare, ranks = self._trainer.unwrapped_model, self._trainer.accelerator.group.size
        return averages_boxes(bare) and not (ranks > 1 and reduces_counts(bare))

    def shifted_labels(self, batch: Any, labels: Any) -> Any:
        """Return the labels if the model's loss compares each prediction with the next label, else `None`."""
        from trainer_lib.trainer.losses.label_shift import has_token_labels

        is_shifted_already = self._trainer.loss_fn is not None or SHIFTED_LABELS in (as_mapping(batch) or ())
        if is_shifted_already or not has_token_labels(labels):
            return None
        shift = self._trainer.label_shift
        return labels if (shift.answer if shift.is_known else shift(batch)) else None

    def forget(self) -> None:
        """Forget what was made from the loss function and the model; the next batch uses those that there are then."""
        self._objective, self._has_checked = None, False
        for name in ("ignored_label", "counted_names", "_labels_of_model", "averages_samples", "averages_boxes"):
            self.__dict__.pop(name, None)

    @property
    def has_own_step(self) -> bool:
        """Whether a subclass overrides `training_step`."""
        return is_overridden(type(self._trainer), "training_step")

    def by_default(self, model: Any, batch: Any, keeps_outputs: bool = True) -> LossResult:
        """Return the loss of a batch as computed unless a subclass overrides `compute_loss`."""
        return (self._objective or self._made_objective())(model, batch, keeps_outputs)

    def evaluate(self, model: Any, batch: Any, keeps_outputs: bool = True) -> tuple[Any, LossResult | None]:
        """Return the outputs of a model, and the loss by default if the batch allows it."""
        return (self._objective or self._made_objective()).evaluate(model, batch, keeps_outputs)

    def computed(self, model: Any, batch: Any) -> LossResult:
        """Return the loss of a batch as `compute_loss` returns it."""
        return self.as_result(self._trainer.compute_loss(model, batch), batch)

    def of(self, model: Any, batch: Any) -> LossResult:
        """Return the loss of a training batch, as changed by callbacks in `on_loss`."""
        return self.changed(self.computed(model, batch))

    def as_result(self, value: Any, batch: Any) -> LossResult:
        """Return the value of `compute_loss` as a sum with its weight."""
        result = self.checked(value)
        if result.weight is not None:
            return result
        weight = self.items(batch)
        return result._replace(loss=sum_from_mean(result.loss, weight), weight=weight)

    def checked(self, value: Any) -> LossResult:
        """Return the value of `compute_loss`, checked; without a weight it is a mean."""
        if type(value) is LossResult:
            if not self._has_checked:
                check_loss(value.loss, "compute_loss")
                self._has_checked = True
            return value
        parts: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        loss, outputs = parts
        if not is_scalar(loss):
            check_loss(loss, "compute_loss")
        return LossResult(loss, None, outputs)

    def items(self, batch: Any) -> Weight:
        """Return the number of items in a mean, checked."""
        weight = self._trainer.num_items(batch)
        if type(weight) is float and weight >= 0:  # first: by far the most frequent
            return weight
        if not isinstance(weight, Tensor) or weight.ndim:
            check_weight(weight, "The value that num_items returns")
        return weight

    def samples(self, batch: Any) -> int:
        """Return the number of samples in a batch: its rows, or what the loader read if it holds no tensors."""
        if (rows := count_rows(batch)) is not None:
            return rows or 1
        loader = self._trainer.accelerator.gradient_state.active_dataloader
        read = None if loader is None else loader.samples_in_batch
        if read is None and (loader is None or loader.rows is None):
            _logger.warning_once(
                f"The samples of a batch of type {type(batch).__name__} cannot be counted, so each batch counts as one "
                "in losses. Override num_items(batch), which returns how many items the mean loss averages over."
            )
        return read or 1

    def boxes(self, batch: Any) -> float:
        """Return the number of boxes that the loss of a batch is divided by, at least 1; its samples without labels."""
        labels = targets_of(batch, self._trainer.args.label_names)
        if labels is None:
            return float(self.samples(batch))
        return float(max(sum(len(of_image["class_labels"]) for of_image in labels), 1))

    def changed(self, result: LossResult) -> LossResult:
        """Return a training loss as changed by callbacks in `on_loss`."""
        run = self._trainer.run
        run.loss_sum, run.outputs = result.loss, result.outputs
        run.weight = 0.0 if result.weight is None else result.weight  # `as_result` has set it
        self._trainer.events.fire("on_loss", run)
        return result._replace(loss=run.loss_sum, weight=run.weight)

    def describe(self) -> str:
        """Return, in a few words, which items the mean loss counts."""
        kind = type(self._trainer)
        overridden = [method for method in ("training_step", "compute_loss") if is_overridden(kind, method)]
        if overridden or not isinstance(self._trainer.model, nn.Module):
            return f"as {kind.__name__}.{overridden[0] if overridden else 'training_step'} returns it"
        return (self._objective or self._made_objective()).describe()

    def _made_objective(self) -> Objective:
        trainer = self._trainer
        if not isinstance(trainer.model, nn.Module):
            raise ConfigurationError(
                f"The trainer has {len(trainer.model)} models and cannot tell which of them computes the loss. "
                "Override training_step(models, batch) or compute_loss(models, batch)."
            )
        bare, label_names = trainer.unwrapped_model, trainer.args.label_names
        check = MeanCheck(bare, trainer.num_items, self.counted_names, self._needs_mean_check)
        if trainer.loss_fn is None:
            self._objective = ModelLoss(bare, trainer.num_items, trainer.accelerator.precision, check, label_names)
            return self._objective
        if isinstance(trainer.loss_fn, nn.Module):
            trainer.loss_fn.to(trainer.accelerator.device)
        self._objective = LossFunction(trainer.loss_fn, bare, label_names, check, self._count_targets)
        return self._objective

    def _count_targets(self, batch: Any) -> Weight:
        """Return the count for a loss function that takes `num_items_in_batch`: as in Hugging Face's Trainer."""
        targets = targets_of(batch, self._trainer.args.label_names)
        is_value = isinstance(targets, Tensor) and targets.is_floating_point()
        if is_value and not is_overridden(type(self._trainer), "num_items"):
            return count_valid(targets)
        return self.items(batch)

    def _needs_mean_check(self) -> bool:
        accelerator = self._trainer.accelerator
        batches = accelerator.gradient_accumulation_steps * accelerator.data_group.size
        # The check runs a model without a loss function, which ranks of a sharded model would all have to do equally
        # often, as would those that compute parts of sequences.
        runs_sharded = self._trainer.loss_fn is None and accelerator.strategy.needs_lockstep
        return batches > 1 and not runs_sharded and accelerator.sequence_split.ranks is None
