"""The `Trainer`: fit, evaluate, predict, save, and the methods to override."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.accelerator import Accelerator
from trainer_lib.events import Callback, Control, Dispatcher, Run, RunState
from trainer_lib.filesystem.remote_paths import AnyPath, local_path, path_at
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnknownMemberError, unknown
from trainer_lib.foundation.signatures import ConstructorSignature
from trainer_lib.logging import get_logger
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.processes.exit_codes import Interrupted, is_interactive
from trainer_lib.runs.run_lease import Lease
from trainer_lib.scheduler import AcceleratedScheduler
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.rules import CHECKS
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checkpoints.finished_runs import load_finished
from trainer_lib.trainer.checkpoints.resume import ResumePoint, checkpoint_at, find_resume_point
from trainer_lib.trainer.checks import at_construction, before_fit
from trainer_lib.trainer.checks.foreign_calls import explains_foreign_calls, missing_member
from trainer_lib.trainer.data import validation_split
from trainer_lib.trainer.evaluation.eval_loop import NOTHING_MEASURED, EvaluationSet, Evaluator
from trainer_lib.trainer.evaluation.eval_sets import metrics_over_sets, named_sets, sets_at_intervals
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.evaluation.prediction_results import Predictions
from trainer_lib.trainer.fit.build_accelerator import adapt_model, build_accelerator, numerics
from trainer_lib.trainer.fit.running_means import RunningMeans
from trainer_lib.trainer.fit.session import FitSession
from trainer_lib.trainer.fit.train_loop import TrainLoop
from trainer_lib.trainer.losses.label_shift import LabelShift
from trainer_lib.trainer.losses.loss_checks import check_loss, check_weight
from trainer_lib.trainer.losses.loss_result import LossResult, Weight, sum_from_mean
from trainer_lib.trainer.losses.mean_check import MeanCheck
from trainer_lib.trainer.losses.model_io import count_items, is_scalar
from trainer_lib.trainer.losses.objectives import LossFunction, ModelLoss, Objective
from trainer_lib.trainer.metrics.training_metrics import TrainingMetrics
from trainer_lib.trainer.optim.optimizer_modes import weights_in_use
from trainer_lib.trainer.publish.save_pretrained import read_arguments, save_model
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.safety.bad_samples import leave_out_while_evaluating
from trainer_lib.trainer.safety.deadline import AUTO
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard
from trainer_lib.trainer.safety.signals import Signals

if TYPE_CHECKING:
    from trainer_lib.trainer.tools.hyperparameter_search import SearchResult, Space
    from trainer_lib.trainer.tools.learning_rate_finder import LearningRateSweep
    from trainer_lib.trainer.tools.preview import Preview

_logger = get_logger(__name__)

LossLike = Tensor | tuple[Tensor, Any] | LossResult

# Members of a trainer for the loop and callbacks; `dir()` and completion do not list them.
_INTERNAL = frozenset(
    (
        "as_result",
        "averages",
        "changed_loss",
        "default_metric",
        "describe_loss",
        "evaluation_interval",
        "has_own_step",
        "is_rehearsing",
        "is_shifted",
        "loses_by_default",
        "make_schedulers",
        "measures",
        "objective",
        "prepare_models",
        "prepared",
        "prepared_by_name",
        "unwrapped_model",
    )
)


class Trainer:
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
        train_metrics: The metrics of training batches, for the logs: means such as "accuracy", and functions of
            predictions and labels.
        compute_metrics: A function of all predictions and labels, as in Hugging Face's Trainer.
        optimizer: An optimizer, a function that makes one from parameters, or several of these by name.
        scheduler: A schedule, a function that makes one from an optimizer, or several of these by name.
        callbacks: Callbacks in addition to the default ones. A callback replaces the default one of its class;
            callbacks of Hugging Face's Trainer are adapted.
        accelerator: An accelerator to use in place of one that the trainer makes from the arguments.

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
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        callbacks: Sequence[Callback | Any] | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.args = at_construction.checked_arguments(args).effective()
        self.model = at_construction.checked_model(model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.loss_fn, self.collate_fn, self.processing_class = loss_fn, collate_fn, processing_class
        self.metrics, self.compute_metrics = metrics, compute_metrics
        self.optimizer, self.scheduler = optimizer, scheduler
        at_construction.check(self, Trainer)
        if self.args.validation_split is not None and train_dataset is not None:
            self.train_dataset, self.eval_dataset = validation_split.split_for(self)
        self.events = Dispatcher(defaults.callbacks(self.args, at_construction.checked_callbacks(callbacks)))
        names = [] if self.eval_dataset is None else list(named_sets(self, self.eval_dataset))
        if train_metrics is not None:
            self.events.add(TrainingMetrics(train_metrics))
        self.measures = defaults.measures(names, metrics, compute_metrics)
        if accelerator is not None:
            at_construction.check_accelerator(accelerator, self.args)
        self.accelerator = accelerator or build_accelerator(self.args)
        self.averages = RunningMeans(self.accelerator.group, self.accelerator.device)
        self.prepared: Any = None
        self._guard: NonFiniteGuard | None = None  # of the current run, if it reads losses
        self.run = Run(trainer=self, args=self.args, accelerator=self.accelerator)
        self._objective: Objective | None = None
        self.is_rehearsing = False  # True while a tool, such as the learning-rate finder, trains
        self._has_fitted = self._has_checked_loss = False
        self._run_folder: AnyPath | None = None
        self._generation_options: Mapping[str, Any] = {}  # of the current evaluation or prediction

    if not TYPE_CHECKING:  # type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another trainer's member."""
            if hasattr(type(self), name):  # a property raised AttributeError: raise that error again
                return object.__getattribute__(self, name)
            raise UnknownMemberError(missing_member(type(self), name, dir(self)))

    def __dir__(self) -> list[str]:
        """Return the members that you call and override, without those that only the loop uses."""
        return [name for name in super().__dir__() if name not in _INTERNAL]

    @classmethod
    def from_checkpoint(cls, checkpoint: str | AnyPath, model: nn.Module, **options: Any) -> Self:
        """Return a trainer with the arguments and weights of a checkpoint; its `fit` resumes from there.

        Args:
            checkpoint: The folder of a checkpoint, or of a run, for its newest checkpoint.
            model: A model of the same architecture.
            **options: Other arguments of the trainer: datasets, metrics, callbacks.
        """
        from trainer_lib.trainer.checkpoints.peft import load_weights

        folder = checkpoint_at(checkpoint)
        # A deadline given as a date was that of the job that saved the checkpoint.
        saved = read_arguments(folder)
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
    def fit(self, resume: str | AnyPath | None = None) -> FitResult:
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
        before_fit.check(self)
        resume_point, lease = find_resume_point(
            self.args.output_folder,
            self.args.run_name,
            str(self.args.resume) if resume is None else str(CHECKS["resume"]("resume", resume)),
            self.accelerator.group,
            defaults.run_fingerprint(self),
        )
        with lease:
            return self._fit_from(resume_point, lease)

    def _fit_from(self, resume_point: ResumePoint, lease: Lease) -> FitResult:
        self._run_folder = None if resume_point.folder is None else resume_point.folder.path
        if self._has_fitted:  # a second fit keeps the weights and resets everything else
            self.accelerator.free_memory()
            self.prepared = None
        self._has_fitted = True
        self.averages.clear()
        if resume_point.is_finished and resume_point.folder is not None:
            with numerics(self.args):
                return load_finished(self, resume_point.folder, resume_point.checkpoint)
        signals = Signals(self.args.stop_signals, Control(), self.accelerator.is_main_process)
        with numerics(self.args), signals:
            session = FitSession(self, resume_point.folder, signals, lease)
            self.run = session.run
            self._guard = session.guard if session.guard.reads_losses else None
            status = "failed"
            try:
                session.begin(resume_point.checkpoint)
                TrainLoop(session).train()
                if session.interruption is None:
                    session.finish()
                status = session.run.state.status
            except KeyboardInterrupt:
                status = "interrupted"
                session.saves.close()  # first, so that on_interrupt sees all checkpoints
                self.events.fire("on_interrupt", session.run)
                raise
            except BaseException as error:
                session.saves.close()
                self.events.fire("on_exception", session.run, error)
                raise
            finally:
                session.close(status)
        result = session.result()
        if session.interruption is not None and not is_interactive():
            session.leave_together()
            signals.hand_on()
            raise Interrupted(session.interruption, result)
        signals.hand_on()
        if result.status == "unsaved":
            raise session.saves.unsaved_error(result)
        return result

    @explains_foreign_calls
    def evaluate(self, dataset: Any = None, prefix: str = "eval", **generation_kwargs: Any) -> dict[str, float]:
        """Evaluate, and return the metrics, which are the same on all ranks.

        Args:
            dataset: The data, or several sets by name; by default `eval_dataset`.
            prefix: The prefix of the metrics' names (Hugging Face's `metric_key_prefix`).
            **generation_kwargs: With `predict_with_generate`, more arguments of `generate`: `max_length=64`.
        """
        if not isinstance(prefix, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"prefix must be a text, the prefix of the metrics' names (got {shown(prefix)}).")
        is_default = dataset is None
        data, label = (self.eval_dataset, "eval_dataset") if is_default else (dataset, "evaluate(dataset)")
        if data is None:
            raise ConfigurationError("evaluate() needs data: Trainer(eval_dataset=…), or evaluate(dataset).")
        loaders = before_fit.eval_loaders(self, data, label)
        self.prepare_models()
        sets = {name: self._set(name, loader) for name, loader in loaders.items()}
        with self._generating(generation_kwargs):
            metrics = self._evaluator.evaluate(self.run, self.prepared, sets, prefix, metrics_over_sets(self))
        if not metrics:
            _logger.warning_once(NOTHING_MEASURED)
        return metrics

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
        if dataset is None:
            raise ConfigurationError("predict() needs data: predict(dataset).")
        (unprepared,) = before_fit.eval_loaders(self, dataset, "predict(dataset)", is_one=True).values()
        self.prepare_models()
        loader = self._prepared_for_evaluation(unprepared)
        target = None if to is None else local_path(to, "predict(to=…)")
        _, compute_metrics = self.measures[""]
        with self._generating(generation_kwargs):
            return self._evaluator.predict(
                self.run, self.prepared, loader, to=target, prefix=prefix, compute_metrics=compute_metrics
            )

    def preview(self, batches: int = 2) -> "Preview":
        """Return a summary of the first training batches, as the model gets them.

        The batches are collated, on the device, and changed by callbacks such as `Mixup`. With several ranks, each rank
        sees its own batches, and all ranks have to call it. The trainer's state does not change.

        Args:
            batches: The number of batches.
        """
        from trainer_lib.trainer.tools.preview import preview

        return preview(self, batches)

    def find_learning_rate(
        self, lowest: float = 1e-7, highest: float = 10.0, updates: int = 100
    ) -> "LearningRateSweep":
        """Train with a rising learning rate, and return the losses and the rate at which they fell fastest.

        The rate grows by the same factor with each update, without a schedule. The sweep ends when the mean of the last
        three losses is above four times that of the first three, or a loss is NaN or Inf. The trainer's state does not
        change.

        Args:
            lowest: The first learning rate.
            highest: The last learning rate, unless the sweep ends early.
            updates: The number of updates between them.

        Raises:
            ConfigurationError: If there are several optimizers, or no data.
        """
        from trainer_lib.trainer.tools.learning_rate_finder import find_learning_rate

        return find_learning_rate(self, lowest, highest, updates)

    def find_batch_size(self, largest: int = 1024, updates: int = 2) -> int:
        """Return the largest batch size per rank that fits into memory.

        The search trains with the batch size of the arguments, and doubles it until a batch does not fit into memory,
        or halves it until one does. With several ranks, the result fits on each of them. The trainer's state does not
        change.

        Args:
            largest: The largest size to try. Sizes above the number of samples of a rank are not tried.
            updates: The number of updates with each size.

        Raises:
            NoExecutableBatchSizeError: If not even a single sample fits.
        """
        from trainer_lib.trainer.tools.batch_size_finder import find_batch_size

        return find_batch_size(self, largest, updates)

    def search(
        self,
        space: "Space",
        n: int = 20,
        *,
        metric: str | None = None,
        greater_is_better: bool | None = None,
        study: Any = None,
    ) -> "SearchResult":
        """Train `n` times with arguments that optuna proposes, and return the best ones.

        Each trial starts from the current weights, in its own run folder in `output_dir/search`. The search does not
        change the model. A trial that runs out of memory or whose metric is NaN or Inf fails, and the search continues.

        Args:
            space: The values of each argument: a list, a range `(low, high)`, or `(low, high, "log")`; or a function of
                optuna's trial that returns arguments by name.
            n: The number of trials.
            metric: The metric to optimize, from the last evaluation; by default the one that selects the best
                checkpoint.
            greater_is_better: Whether higher is better; inferred for common metric names.
            study: An optuna study to continue; by default a new one, seeded by `seed`.

        Raises:
            MissingPackageError: If the extra `search` is not installed.
        """
        from trainer_lib.trainer.tools.hyperparameter_search import search

        return search(self, space, n, metric, greater_is_better, study)

    def save_model(self, output_dir: str | AnyPath | None = None) -> None:
        """Save the model and its processor in the format of `from_pretrained`; all ranks have to call it.

        Args:
            output_dir: The folder; by default `model` in the run's folder, after `fit` with an `output_dir`.
        """
        if output_dir is None and self._run_folder is None:
            raise ConfigurationError(
                "save_model() needs a folder: without one it saves into the run's folder, and there is no run yet. "
                'Give one: save_model("model"); or call it after fit() with output_dir.'
            )
        self.prepare_models()
        target = self._run_folder / "model" if output_dir is None and self._run_folder else path_at(output_dir or "")
        with weights_in_use(self):
            save_model(self, target)

    def model_card(
        self,
        *,
        name: str | None = None,
        license: str | None = None,
        language: str | Sequence[str] | None = None,
        base_model: str | None = None,
        datasets: str | Sequence[str] | None = None,
        task: str | None = None,
        tags: Sequence[str] = (),
    ) -> str:
        """Return the model card, a README for the Hub: description, metrics, arguments and versions.

        Args:
            name: The name of the model.
            license: The Hub's identifier of the license: "mit", "apache-2.0".
            language: The language of the data, or several: "en".
            base_model: The model on the Hub that was fine-tuned; by default from the model's config.
            datasets: The datasets on the Hub that the model was trained on; by default from the training data.
            task: The Hub's identifier of the task: "image-classification"; by default from a transformers model.
            tags: More tags.

        Example:
            >>> args = TrainingArguments(max_steps=1, use_cpu=True)
            >>> Trainer(nn.Linear(4, 2), args).model_card(license="mit").splitlines()[:3]
            ['---', 'library_name: trainer_lib', 'license: mit']
        """
        from trainer_lib.trainer.publish.model_card import model_card

        return model_card(
            self,
            name=name,
            license=license,
            language=language,
            base_model=base_model,
            datasets=datasets,
            task=task,
            tags=tags,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        exist_ok: bool = True,
        token: str | None = None,
        card: str | None = None,
        **about: Any,
    ) -> str:
        """Upload the model and its card to the Hugging Face Hub in one commit; all ranks have to call it.

        Args:
            repo_id: The repository, "owner/name"; it is created if it does not exist.
            commit_message: The message of the commit.
            private: Whether a new repository is private; by default as the owner's settings say.
            revision: The branch; by default "main".
            create_pr: Open a pull request instead of committing.
            exist_ok: Whether the repository may exist already.
            token: An access token; by default that of `hf auth login` or `HF_TOKEN`.
            card: The text of the README; by default that of `model_card`.
            **about: Arguments of `model_card`: `license="mit"`.

        Returns:
            The URL of the commit or of the pull request.

        Raises:
            HubError: If the Hub cannot be reached after several attempts, or refuses the upload; on all ranks.
        """
        from trainer_lib.trainer.publish.hub import Commit, push_to_hub

        commit = Commit(commit_message, private, revision, create_pr, exist_ok)
        return push_to_hub(self, repo_id, commit, token, card, about)

    def export(
        self,
        path: str | AnyPath,
        format: str | None = None,
        *,
        example: Any = None,
        dynamic: Sequence[int] = (0,),
    ) -> None:
        """Export the model as a program that runs without its code; all ranks have to call it.

        The exported model is in evaluation mode, in full precision, on the CPU, with averaged weights if the run has
        any. The trainer's model does not change.

        Args:
            path: The file: `.pt2`, which `torch.export.load` reads, or `.onnx`.
            format: "torch" or "onnx"; by default from the ending of the path.
            example: An example of the model's inputs: a tensor, a tuple, or a dict by names; by default the inputs of
                the first samples of `eval_dataset`, else of `train_dataset`.
            dynamic: The dimensions whose sizes may differ from the example's: (0,) is the batch, (0, 1) also the length
                of texts.

        Raises:
            UnsupportedError: If the model cannot be exported.
            PreparationError: If the model is sharded.
        """
        from trainer_lib.trainer.publish.export import export

        export(self, path_at(path), format, example, dynamic)

    def log(self, name: str, value: float | Tensor, weight: Weight = 1.0) -> None:
        """Log a value: the next log shows its weighted mean over batches, steps and ranks.

        Call it from anywhere: `compute_loss`, a callback, a metric. Nothing is read from the device before the log.
        """
        if name == "loss" and not self.has_own_step:
            raise ConfigurationError(
                'log("loss", …): the training loss is already logged under this name. Give the value another name.'
            )
        if not self.run.weighs_nothing:
            self.averages.add(name, value, weight)

    def backward(
        self, loss: Tensor, weight: Weight | None = None, optimizer: str | Sequence[str] | None = None
    ) -> None:
        """Compute gradients, in a `training_step` that you override.

        Args:
            loss: With `weight`, the sum of the losses of that many items; without, a mean with weight 1.
            weight: The number of items.
            optimizer: The optimizer that uses these gradients, by name, or several; by default all.
        """
        weight = 1.0 if weight is None else weight
        if self.run.weighs_nothing:
            loss, weight = loss * 0.0, 0.0
        if self._guard is not None:
            weight = self._guard.weigh(loss.new_zeros(()) if self.run.weighs_nothing else loss, weight)
        is_only = len(self.run.optimizers) == 1 and optimizer is None
        self.accelerator.backward(loss, weight=weight, optimizer=None if is_only else self._optimizers(optimizer))

    @property
    def state(self) -> RunState:
        """The progress of the run."""
        return self.run.state

    @property
    def optimizers(self) -> dict[str, AcceleratedOptimizer]:
        """The prepared optimizers by name; a single one is called "default"."""
        return self.run.optimizers

    @property
    def schedulers(self) -> dict[str, AcceleratedScheduler]:
        """The prepared schedules, by the names of their optimizers."""
        return self.run.schedulers

    # -- methods to override -------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, batch: Any) -> LossLike:
        """Return the loss of a batch: a mean, `(mean, outputs)`, or a `LossResult`.

        Example:
            >>> import torch
            >>> class Regression(Trainer):
            ...     def compute_loss(self, model, batch):
            ...         inputs, targets = batch
            ...         return torch.nn.functional.mse_loss(model(inputs), targets)
        """
        return self.objective(model, batch)

    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        """Compute the gradients of a batch. An override that steps optimizers itself returns `None` and logs itself."""
        result = self.as_result(self.compute_loss(model, batch), batch)
        if "on_loss" in self.events._handlers:
            result = self.changed_loss(result)
        self.backward(result.loss, result.weight)
        return result

    def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
        """Return the loss, predictions and labels of a batch, without gradients."""
        return defaults.evaluation_output(self, model, batch)

    def num_items(self, batch: Any) -> Weight:
        """Return the number of items in the mean loss of a batch: labels that are not ignored, else samples."""
        return count_items(batch, self.args.label_names, self.label_shift(batch))

    def configure_optimizer(self) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer of the trainable parameters, or several optimizers by name."""
        return defaults.optimizers(self)

    def configure_scheduler(self, optimizer: Optimizer, total_steps: int | None, name: str = "default") -> Any:
        """Return the schedule of an optimizer, or `None`.

        Args:
            optimizer: The optimizer.
            total_steps: The number of updates of the run; `None` where it is not known.
            name: The name of the optimizer, if there are several.
        """
        return defaults.scheduler(self, name, optimizer, total_steps)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data, before it is sharded across ranks."""
        return defaults.train_loader(self, self.train_dataset)

    def eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of evaluation data, before it is sharded across ranks."""
        return defaults.eval_loader(self, dataset)

    # -- for the loop and callbacks -------------------------------------------------------------------------------

    def prepare_models(self) -> list[nn.Module]:
        """Prepare the models, once, and return them."""
        if self.prepared is None:
            accelerator, is_single = self.accelerator, isinstance(self.model, nn.Module)
            named = {"": self.model} if isinstance(self.model, nn.Module) else dict(self.model)
            prepared = {
                name: accelerator.prepare_model(
                    adapt_model(model, self.args, accelerator),
                    evaluation_mode=not any(parameter.requires_grad for parameter in model.parameters()),
                )
                for name, model in named.items()
            }
            self.prepared = self.run.model = prepared[""] if is_single else prepared
            self._evaluator = Evaluator(accelerator, self.events, self.evaluation_step)
        return list(self.prepared.values()) if isinstance(self.prepared, dict) else [self.prepared]

    def prepared_by_name(self) -> dict[str, nn.Module]:
        """Return the prepared models by name; a single one has the name ""."""
        self.prepare_models()
        return dict(self.prepared) if isinstance(self.prepared, dict) else {"": self.prepared}

    @property
    def loses_by_default(self) -> bool:
        """Whether no subclass overrides `compute_loss`."""
        return type(self).compute_loss is Trainer.compute_loss

    @property
    def has_own_step(self) -> bool:
        """Whether a subclass overrides `training_step`."""
        return type(self).training_step is not Trainer.training_step

    @property
    def objective(self) -> Objective:
        """The loss of a model and a batch, as computed unless a subclass overrides `compute_loss`."""
        if self._objective is None:
            self._objective = self._make_objective()
        return self._objective

    def as_result(self, value: Any, batch: Any) -> LossResult:
        """Return the value of `compute_loss` as a sum with its weight."""
        if type(value) is LossResult:
            if not self._has_checked_loss:
                check_loss(value.loss, "compute_loss")
                self._has_checked_loss = True
            if value.weight is not None:
                return value
            weight = self._items(batch)
            return value._replace(loss=sum_from_mean(value.loss, weight), weight=weight)
        parts: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        loss, outputs = parts
        if not is_scalar(loss):
            check_loss(loss, "compute_loss")
        weight = self._items(batch)
        return LossResult(sum_from_mean(loss, weight), weight, outputs)

    def changed_loss(self, result: LossResult) -> LossResult:
        """Return a training loss as changed by callbacks in `on_loss`."""
        run = self.run
        run.loss_sum, run.outputs = result.loss, result.outputs
        run.weight = 0.0 if result.weight is None else result.weight  # `as_result` has set it
        self.events.fire("on_loss", run)
        return result._replace(loss=run.loss_sum, weight=run.weight)

    def describe_loss(self) -> str:
        """Return, in a few words, which items the mean loss counts."""
        overridden = [
            method
            for method in ("training_step", "compute_loss")
            if getattr(type(self), method) is not getattr(Trainer, method)
        ]
        if overridden or not isinstance(self.model, nn.Module):
            return f"as {type(self).__name__}.{overridden[0] if overridden else 'training_step'} returns it"
        return self.objective.describe()

    def make_schedulers(self, optimizers: Mapping[str, Optimizer], total_steps: int | None) -> dict[str, Any]:
        """Return the schedules, by the names of their optimizers."""
        before_fit.check_schedule_names(self.scheduler, optimizers)
        schedules = {
            name: self.configure_scheduler(optimizer, total_steps, name) for name, optimizer in optimizers.items()
        }
        return {
            name: before_fit.checked_schedule(schedule, optimizers[name])
            for name, schedule in schedules.items()
            if schedule is not None
        }

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model; the first if there are several."""
        first = self.prepare_models()[0]
        return self.accelerator.unwrap_model(first)

    @property
    def evaluation_interval(self) -> Every | None:
        """The interval of evaluations during training; `None`: no evaluations. A set may have its own interval."""
        return None if self.eval_dataset is None else self.args.eval_interval

    @property
    def default_metric(self) -> str | None:
        """The metric that selects the best evaluation; `None` without evaluations."""
        if self.eval_dataset is None:
            return None
        named = self.args.metric_for_best
        if named is None:
            (first, *_) = sets_at_intervals(self) or named_sets(self, self.eval_dataset)
            return f"eval_{first}_loss" if first else "eval_loss"
        return named if named.startswith("eval_") else f"eval_{named}"

    @functools.cached_property
    def label_shift(self) -> LabelShift:
        """Whether the model compares each position with the label of the next."""
        return LabelShift(self.unwrapped_model, self.loss_fn is not None, self.args.label_names)

    @property
    def is_shifted(self) -> bool:
        """Whether the model compares each position with the label of the next; known after the first batch."""
        return self.label_shift.answer

    # -- private -------------------------------------------------------------------------------------------------

    @contextmanager
    def _generating(self, options: Mapping[str, Any]) -> Generator[None]:
        self._generation_options = options
        try:
            yield
        finally:
            self._generation_options = {}

    def _make_objective(self) -> Objective:
        if not isinstance(self.model, nn.Module):
            raise ConfigurationError(
                f"The trainer has {len(self.model)} models and cannot tell which of them computes the loss. Override "
                "training_step(models, batch) or compute_loss(models, batch)."
            )
        bare = self.unwrapped_model
        if self.loss_fn is not None:
            if isinstance(self.loss_fn, nn.Module):
                self.loss_fn.to(self.accelerator.device)
            return LossFunction(self.loss_fn, bare, self.args.label_names, self._mean_check(bare))
        return ModelLoss(bare, self.num_items, self._mean_check(bare))

    def _mean_check(self, bare: nn.Module) -> MeanCheck:
        accelerator = self.accelerator

        def is_needed() -> bool:
            batches = accelerator.gradient_accumulation_steps * accelerator.num_processes
            # The check runs the model, which ranks of a sharded model would all have to do equally often.
            return batches > 1 and not accelerator.strategy.needs_lockstep

        return MeanCheck(bare, self.num_items, self.args.label_names, is_needed)

    def _optimizers(self, names: str | Sequence[str] | None) -> list[AcceleratedOptimizer]:
        optimizers = self.run.optimizers
        wanted = [names] if isinstance(names, str) else list(optimizers if names is None else names)
        for name in wanted:
            if name not in optimizers:
                raise ConfigurationError(unknown("optimizer", name, optimizers))
        return [optimizers[name] for name in wanted]

    def _items(self, batch: Any) -> Weight:
        weight = self.num_items(batch)
        if not isinstance(weight, Tensor) or weight.ndim:
            check_weight(weight, "The value that num_items returns")
        return weight

    def _prepared_for_evaluation(self, loader: DataLoader[Any]) -> Any:
        return defaults.prepared_for_evaluation(self, loader)

    def _set(self, name: str, loader: DataLoader[Any]) -> EvaluationSet:
        metrics, compute_metrics = self.measures.get(name, self.measures[""])
        prepared = self._prepared_for_evaluation(loader)
        leave_out_while_evaluating(self.args, prepared, self.accelerator.group)
        return EvaluationSet(
            loader=prepared,
            metrics=metrics,
            compute_metrics=compute_metrics,
        )
