"""The `Trainer`: fit, evaluate, predict, save, and the methods to override."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.events import Callback, Dispatcher, Run, RunState
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.compiler_import import defer_compiler_import
from trainer_lib.foundation.errors import ConfigurationError, UnknownMemberError, UnsupportedError, unknown
from trainer_lib.foundation.lazy_imports import without_collections
from trainer_lib.foundation.public_names.signatures import ConstructorSignature
from trainer_lib.logging import get_logger
from trainer_lib.state.accumulation_window import sum_from_mean
from trainer_lib.trainer.arguments import value_checks
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks import at_construction
from trainer_lib.trainer.checks.foreign_calls import explains_foreign_calls, explains_form, missing_member
from trainer_lib.trainer.evaluation.evaluation_plan import EvaluationPlan
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.evaluation.prediction_results import Predictions
from trainer_lib.trainer.losses.loss_result import LossResult, Weight
from trainer_lib.trainer.losses.model_io import count_items
from trainer_lib.trainer.metrics.running_means import RunningMeans
from trainer_lib.trainer.overridable import DEFAULTS, overridable
from trainer_lib.trainer.publish.publish_methods import PublishMethods
from trainer_lib.trainer.publish.save_pretrained import read_arguments
from trainer_lib.trainer.safety.deadline import AUTO
from trainer_lib.trainer.tools import check_request
from trainer_lib.trainer.tools.tool_methods import ToolMethods
from trainer_lib.trainer.trainer_interface import (
    Assigned,
    TrainerParts,
    Unsettable,
    evaluator_of,
    forget_loss,
    forget_measures,
    forget_model,
)

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator
    from trainer_lib.optimizer import AcceleratedOptimizer
    from trainer_lib.scheduler import AcceleratedScheduler
    from trainer_lib.trainer.losses.label_shift import LabelShift
    from trainer_lib.trainer.result import FitResult

defer_compiler_import()

_logger = get_logger(__name__)

LossLike = Tensor | tuple[Tensor, Any] | LossResult


class Trainer(ToolMethods, PublishMethods):
    """Trains and evaluates a model, saves checkpoints, and logs.

    Args:
        model: The model; or several models by name, which need a `training_step` that you override.
        args: The arguments. Those of Hugging Face's Trainer are converted, and a log message names the ones without an
            equivalent.
        train_dataset: The training data: a dataset of torch or of Hugging Face, a tuple of tensors or arrays, a list of
            samples, or a `DataLoader`.
        eval_dataset: The evaluation data; or several sets by name.
        loss_fn: A function of outputs and targets, if the model does not return its loss.
        collate_fn: A function that makes a batch from a list of samples.
        processing_class: A tokenizer or processor, which pads batches and is saved with the model.
        metrics: The metrics that evaluations compute batch by batch, by name; with several evaluation sets, you can
            give metrics for each set by its name.
        train_metrics: Metrics of training batches to log: means such as "accuracy", and functions of predictions
            and labels.
        compute_metrics: A function of all predictions and labels, as in Hugging Face's Trainer.
        optimizer: An optimizer, an optimizer class (`args` set its options), a function from parameters to an
            optimizer, or several of these by name.
        scheduler: A schedule, a function from an optimizer to a schedule, or several of these by name.
        callbacks: Callbacks in addition to the default ones. A callback replaces the default one of its class;
            callbacks of Hugging Face's Trainer are adapted.
        accelerator: The `Accelerator` to use; by default the trainer makes one from the arguments.

    Example:
        >>> import torch
        >>> inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
        >>> args = TrainingArguments(num_train_epochs=2, learning_rate=0.1, use_cpu=True, progress_bar=False)
        >>> loss_fn = torch.nn.functional.cross_entropy
        >>> trainer = Trainer(torch.nn.Linear(4, 2), args, train_dataset=(inputs, targets), loss_fn=loss_fn)
        >>> trainer.fit().state.step
        step 16/16, epoch 2: loss ...
        16
    """

    collate_fn: Callable[[list[Any]], Any] | None
    loss_fn: Callable[[Any, Any], Any] | None
    processing_class: Any
    compute_metrics: Callable[..., Mapping[str, float]] | None
    metrics: Any
    optimizer: Any
    scheduler: Any
    eval_dataset: Any
    train_dataset: Any

    if not TYPE_CHECKING:  # annotated above, or in the constructor
        model = Assigned(forget_model, at_construction.check_new_model)
        loss_fn = Assigned(forget_loss, at_construction.check_loss)
        eval_dataset, metrics, compute_metrics = (Assigned(forget_measures) for _ in range(3))
        should_stop = Unsettable("Set trainer.run.control.stop = True, or in a callback run.control.stop = True.")

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the arguments."""
        if cls.__init__ is Trainer.__init__:
            at_construction.check_names(cls.__init__, positional, named)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        args: TrainingArguments | Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        metrics: Any = None,
        train_metrics: Any = None,
        compute_metrics: Callable[..., Mapping[str, float]] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        callbacks: Sequence[Callback | Any] | None = None,
        accelerator: "Accelerator | None" = None,
    ) -> None:
        with without_collections():
            from trainer_lib.trainer import defaults
            from trainer_lib.trainer.changed_arguments import remembered
            from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import build_accelerator
            from trainer_lib.trainer.losses.batch_loss import BatchLoss

        self.args: TrainingArguments = at_construction.checked_arguments(args).effective()
        self.model: nn.Module | Mapping[str, nn.Module] = at_construction.checked_model(model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.loss_fn, self.collate_fn, self.processing_class = loss_fn, collate_fn, processing_class
        self.metrics, self.compute_metrics = metrics, compute_metrics
        self.optimizer, self.scheduler = optimizer, scheduler
        at_construction.check(self, Trainer)
        if self.args.validation_split is not None and train_dataset is not None:
            from trainer_lib.trainer.data import validation_split

            self.train_dataset, self.eval_dataset = validation_split.split_for(self)
        given = at_construction.checked_callbacks(callbacks)
        all_callbacks = defaults.callbacks(self.args, given)
        self.events: Dispatcher = Dispatcher(all_callbacks)
        if train_metrics is not None:
            from trainer_lib.trainer.metrics.training_metrics import TrainingMetrics, TrainingMetricsOfParts

            in_parts = self.args.per_device_train_batch_size == value_checks.AUTO
            self.events.add((TrainingMetricsOfParts if in_parts else TrainingMetrics)(train_metrics))
        evaluation = EvaluationPlan(self)
        if accelerator is not None:
            at_construction.check_accelerator(accelerator, self.args)
        self.accelerator: Accelerator = accelerator or build_accelerator(check_request.engine_arguments(self.args))
        self.run: Run = Run(trainer=self, args=self.args, accelerator=self.accelerator)
        self.parts: TrainerParts = TrainerParts(
            loss=BatchLoss(self),
            evaluation=evaluation,
            make_evaluator=functools.partial(evaluator_of, self),
            means=RunningMeans(self.accelerator.group, self.accelerator.device),
            arguments=remembered(self.args),
            default_callbacks=defaults.others(all_callbacks, given),
            owns_accelerator=accelerator is None,
        )

    if not TYPE_CHECKING:  # type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another trainer's member."""
            if hasattr(type(self), name):  # a property raised AttributeError: raise that error again
                return object.__getattribute__(self, name)
            raise UnknownMemberError(missing_member(type(self), name, dir(self)))

    def __getstate__(self) -> Any:
        """Refuse copies and pickles: a trainer holds processes, files and locks."""
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be copied or pickled. Make another one with a copy of the model, "
            "copy.deepcopy(trainer.unwrapped_model); for another process, make it there, in the function that is "
            "launched. To keep what was trained: trainer.save_model(folder)."
        )

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | AnyPath,
        model: nn.Module,
        *,
        arguments_class: type[TrainingArguments] = TrainingArguments,
        **options: Any,
    ) -> Self:
        """Return a trainer with the arguments and weights of a checkpoint; its `fit` resumes from there.

        Args:
            checkpoint: The folder of a checkpoint, or of a run, for its newest checkpoint.
            model: A model of the same architecture.
            arguments_class: The class of the run's arguments, if you derived one from `TrainingArguments`.
            **options: Other arguments of the trainer: `loss_fn`, datasets, metrics, callbacks.
        """
        from trainer_lib.trainer.checkpoints.find_resume_point import checkpoint_at
        from trainer_lib.trainer.checkpoints.peft import load_weights

        folder = checkpoint_at(checkpoint, "checkpoint")
        # A deadline given as a date was that of the job that saved the checkpoint.
        saved = read_arguments(folder, arguments_class)
        deadline = AUTO if saved.deadline == AUTO else None
        args = dataclasses.replace(saved, resume=str(folder), deadline=deadline)
        if not isinstance(at_construction.checked_model(model), nn.Module):
            raise ConfigurationError(
                "from_checkpoint takes one model (got several). To resume a run of several models, give the arguments: "
                f"Trainer(models, args).fit(resume={str(folder)!r})."
            )
        load_weights(model, folder)
        return cls(model, args, **options)

    @classmethod
    def from_transformers(cls, trainer: Any, **options: Any) -> Self:
        """Return a trainer made from a `transformers.Trainer`, and log what has no equivalent.

        It takes over model, data, collator, metrics, optimizer and callbacks, and converts the arguments. If your
        trainer is a subclass that overrides methods, derive a class from this one and override them there.

        Args:
            trainer: The trainer of Hugging Face.
            **options: Arguments of this trainer that replace those of the other.
        """
        from trainer_lib.trainer.huggingface.trainer_conversion import trainer_options

        return cls(**trainer_options(trainer, cls, options))

    # -- methods to call -----------------------------------------------------------------------------------------

    @explains_foreign_calls
    def fit(self, resume: str | AnyPath | None = None) -> "FitResult":
        """Train.

        Args:
            resume: "never", "auto", "extend" or a checkpoint's folder; by default `args.resume`.

        Returns:
            The result of the run.

        Raises:
            Interrupted: If a signal or a deadline ended the run early, after its checkpoint was saved; in a notebook,
                `fit` returns the result instead.
            UnsavedError: If training ended and the last checkpoint could not be written.
        """
        with without_collections():
            from trainer_lib.trainer.fit import fit_run

        check_request.answer(self)
        return fit_run.fit(self, resume)

    @overridable
    @explains_foreign_calls
    def evaluate(self, dataset: Any = None, prefix: str = "eval", **generation_kwargs: Any) -> dict[str, float]:
        """Evaluate, and return the metrics, which are the same on all ranks.

        Args:
            dataset: The data, or several sets by name; by default `eval_dataset`.
            prefix: The prefix of the metrics' names (Hugging Face's `metric_key_prefix`).
            **generation_kwargs: With `predict_with_generate`, more arguments of `generate`: `max_length=64`.
        """
        from trainer_lib.trainer.evaluation import eval_calls

        return eval_calls.evaluate(self, dataset, prefix, generation_kwargs)

    @explains_foreign_calls
    def predict(
        self, dataset: Any, to: str | Path | None = None, prefix: str = "predict", **generation_kwargs: Any
    ) -> Predictions:
        """Return the predictions in the order of the dataset, and, if it has labels, the loss and `compute_metrics`.

        Args:
            dataset: The data, with or without labels.
            to: A folder to write the predictions to, batch by batch, instead of keeping them in memory.
                `compute_metrics`, which needs all of them in memory, is then not called.
            prefix: The prefix of the metrics' names (Hugging Face's `metric_key_prefix`).
            **generation_kwargs: With `predict_with_generate`, more arguments of `generate`: `max_length=64`.
        """
        from trainer_lib.trainer.evaluation import eval_calls

        return eval_calls.predict(self, dataset, to, prefix, generation_kwargs)

    @explains_form
    def log(self, name: str, value: float | Tensor, weight: Weight | None = None) -> None:
        """Log a value: the next log shows its weighted mean over batches, steps and ranks.

        Call it from anywhere: `compute_loss`, a callback, a metric. Nothing is read from the device before the log.
        In an evaluation or prediction, a value that `evaluation_step` or `compute_loss` logs becomes a metric,
        `eval_name`: its mean over all batches of the set.

        Args:
            name: The name.
            value: A number, or a tensor of one.
            weight: The number of items that the value is the mean of; by default 1, and in an evaluation the number
                of samples in the batch.
        """
        if name == "loss" and not self.parts.loss.has_own_step:
            raise ConfigurationError(
                'log("loss", …): the training loss is already logged under this name. Give the value another name.'
            )
        if not self.run.weighs_nothing:
            self.parts.means.add(name, value, weight)

    def backward(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        optimizer: str | Sequence[str] | None = None,
        *,
        is_mean: bool = False,
    ) -> None:
        """Compute gradients, in a `training_step` that you override.

        Zero them with `self.optimizers[name].zero_grad()`, which also resets the weight; `model.zero_grad()` does not.

        Args:
            loss: With `weight`, the sum of the losses of that many items; without it, a mean that has weight 1.
            weight: The number of items.
            optimizer: The optimizer that uses these gradients, by name, or several; by default all.
            is_mean: Whether the loss is the mean over `weight` items instead of their sum.
        """
        weight, guard = 1.0 if weight is None else weight, self.parts.guard
        if is_mean and (isinstance(weight, Tensor) or not weight):  # a mean of nothing is NaN
            loss, is_mean = sum_from_mean(loss, weight), False
        if self.run.weighs_nothing:
            loss, weight = loss * 0.0, 0.0
        if guard is not None:
            weight = guard.weigh(loss.new_zeros(()) if self.run.weighs_nothing else loss, weight, is_mean)
        is_only = len(self.run.optimizers) == 1 and optimizer is None
        optimizers = None if is_only else self._optimizers(optimizer)
        self.accelerator.backward(loss, weight=weight, optimizer=optimizers, is_mean=is_mean)

    @property
    def state(self) -> RunState:
        """The progress of the run."""
        return self.run.state

    @property
    def optimizers(self) -> "dict[str, AcceleratedOptimizer]":
        """The prepared optimizers by name; a single one is called "default"."""
        return self.run.optimizers

    @property
    def schedulers(self) -> "dict[str, AcceleratedScheduler]":
        """The prepared schedules, by the names of their optimizers."""
        return self.run.schedulers

    # -- methods to override -------------------------------------------------------------------------------------

    @overridable
    def compute_loss(self, model: Any, batch: Any) -> LossLike:
        """Return the loss of a batch: a mean, `(mean, outputs)`, or a `LossResult`.

        Example:
            >>> import torch
            >>> class Regression(Trainer):
            ...     def compute_loss(self, model, batch):
            ...         inputs, targets = batch
            ...         return torch.nn.functional.mse_loss(model(inputs), targets)
        """
        return self.parts.loss.by_default(model, batch)

    @overridable
    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        """Compute the gradients of a batch. An override that steps optimizers itself returns `None` and logs itself.

        The result holds the model's outputs only if an override or a callback can read them; otherwise their memory
        is freed before the backward.
        """
        loss, readers = self.parts.loss, self.events.outputs_readers
        is_overridden = getattr(self.training_step, "__func__", None) is not DEFAULTS["training_step"]
        keeps_outputs = is_overridden or "on_loss" in readers or "on_micro_batch_end" in readers
        if keeps_outputs or getattr(self.compute_loss, "__func__", None) is not DEFAULTS["compute_loss"]:
            result = loss.checked(self.compute_loss(model, batch))
            if not keeps_outputs:
                result = result._replace(outputs=None)
        else:
            result = loss.by_default(model, batch, keeps_outputs=False)
        if "on_loss" in self.events.handlers:
            result = loss.changed(loss.as_result(result, batch))
        if result.weight is not None:
            self.backward(result.loss, result.weight)
            return result
        weight = loss.items(batch)
        self.backward(result.loss, weight, is_mean=True)
        return LossResult(sum_from_mean(result.loss.detach(), weight), weight, result.outputs, result.logs)

    @overridable
    def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
        """Return the loss, predictions and labels of a batch, without gradients."""
        from trainer_lib.trainer import defaults

        return defaults.evaluation_output(self, model, batch)

    @overridable
    def num_items(self, batch: Any) -> Weight:
        """Return the number of items in the mean loss of a batch: labels that are not ignored, boxes, or samples."""
        loss = self.parts.loss
        if loss.averages_samples:
            return float(loss.samples(batch))
        if loss.averages_boxes:
            return loss.boxes(batch)
        shift = self.label_shift
        shifted = shift.answer if shift.is_known else shift(batch)
        return count_items(batch, loss.counted_names, shifted, loss.samples, loss.ignored_label)

    @overridable
    def configure_optimizer(self) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer of the trainable parameters, or several optimizers by name."""
        from trainer_lib.trainer import defaults

        return defaults.optimizers(self)

    @overridable
    def configure_scheduler(self, optimizer: Optimizer, total_steps: int | None, name: str = "default") -> Any:
        """Return the schedule of an optimizer, or `None`.

        Args:
            optimizer: The optimizer.
            total_steps: The number of updates of the run; `None` if unknown.
            name: The name of the optimizer, if there are several.
        """
        from trainer_lib.trainer import defaults

        return defaults.scheduler(self, name, optimizer, total_steps)

    @overridable
    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data, before it is sharded across ranks."""
        from trainer_lib.trainer import defaults

        return defaults.train_loader(self, self.train_dataset)

    @overridable
    def eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of evaluation data, before it is sharded across ranks."""
        from trainer_lib.trainer import defaults

        return defaults.eval_loader(self, dataset)

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model; the first if there are several."""
        from trainer_lib.trainer import defaults

        return self.accelerator.unwrap_model(defaults.prepare_models(self).listed[0])

    @functools.cached_property
    def label_shift(self) -> "LabelShift":
        """Whether the model compares each position with the label of the next."""
        from trainer_lib.trainer.losses.label_shift import LabelShift

        return LabelShift(self.unwrapped_model, self.loss_fn is not None, self.parts.loss.counted_names)

    # -- private -------------------------------------------------------------------------------------------------

    def _optimizers(self, names: str | Sequence[str] | None) -> "list[AcceleratedOptimizer]":
        optimizers = self.run.optimizers
        wanted = [names] if isinstance(names, str) else list(optimizers if names is None else names)
        for name in wanted:
            if name not in optimizers:
                raise ConfigurationError(unknown("optimizer", name, optimizers))
        return [optimizers[name] for name in wanted]
