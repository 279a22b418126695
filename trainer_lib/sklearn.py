"""Estimators for scikit-learn: a classifier and a regressor that a `Trainer` fits."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trainer_lib.checkpointing.format.rng_state import preserved_generators
from trainer_lib.foundation.duration import NEVER
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, UnsupportedError, did_you_mean
from trainer_lib.foundation.imports import require
from trainer_lib.foundation.public_names.signatures import ConstructorSignature, unknown_keywords
from trainer_lib.seeding import set_seed
from trainer_lib.state import PartialState
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks.at_construction import checked_arguments
from trainer_lib.trainer.checks.foreign_names import RENAMED
from trainer_lib.trainer.losses.loss_result import LossResult, summed
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.trainer import Trainer

require("sklearn", "sklearn", "scikit-learn")

from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,  # pyright: ignore[reportPrivateUsage] - estimators are meant to call it
    check_is_fitted,
    validate_data,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = np.ndarray[Any, Any]
_PARTS = ("args", "module_kwargs")  # their values are parameters too: args__learning_rate


def _unknown(kind: type, names: Iterable[str]) -> str:
    """Return the message that an estimator has no such parameters, with ours for those of skorch."""
    lines: list[str] = []
    for name in names:
        part, _, within = name.partition("__")
        ours = RENAMED.get(name, name)
        if within and part == "module":
            hint = f" Give module_kwargs={{{within!r}: …}}, or set_params(module_kwargs__{within}=…)."
        elif within and part == "optimizer" and RENAMED.get(within, within) in _field_names(TrainingArguments):
            hint = f" Give args__{RENAMED.get(within, within)}."
        elif ours in _field_names(TrainingArguments):
            hint = f" Give args=TrainingArguments({ours}=…), or set_params(args__{ours}=…)."
        else:
            hint = did_you_mean(name, inspect.signature(kind).parameters)
        lines.append(f"{kind.__name__} has no parameter {name!r}.{hint}")
    return "\n".join(lines)


class _Estimator(BaseEstimator):
    """The base of both estimators: their parameters, and how a `Trainer` fits their module and predicts with it."""

    module_kwargs: Mapping[str, Any] | None
    module_: nn.Module
    result_: FitResult

    _loss: ClassVar[Callable[..., Any]]

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the parameters."""
        del positional
        if unknown := unknown_keywords(cls.__init__, named):
            raise SignatureError(_unknown(cls, unknown))
        return super().__new__(cls)

    def __init__(
        self,
        module: Callable[..., nn.Module],
        args: TrainingArguments | None = None,
        *,
        module_kwargs: Mapping[str, Any] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.module = module
        self.args = args
        self.module_kwargs = module_kwargs
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.metrics = metrics
        self.callbacks = callbacks
        self.verbose = verbose

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name, with `deep` those of `args` and `module_kwargs` too: `args__learning_rate`."""
        parameters: dict[str, Any] = super().get_params(deep=deep)
        if deep:
            for part, values in self._parts().items():
                parameters |= {f"{part}__{name}": value for name, value in values.items()}
        return parameters

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; those of `args` and `module_kwargs` as `args__learning_rate=0.1`.

        Raises:
            ConfigurationError: If there is no parameter of a name.
        """
        inside: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        direct: dict[str, Any] = {}
        for name, value in params.items():
            part, _, within = name.partition("__")
            target, key = (inside[part], within) if within and part in inside else (direct, name)
            target[key] = value
        if unknown := [name for name in direct if name not in self._get_param_names()]:
            raise ConfigurationError(_unknown(type(self), unknown))
        super().set_params(**direct)
        if inside["args"]:  # a copy: other estimators may share the arguments
            self.args = dataclasses.replace(checked_arguments(self.args), **inside["args"])
        if inside["module_kwargs"]:
            self.module_kwargs = {**(self.module_kwargs or {}), **inside["module_kwargs"]}
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the weights on the CPU, so that any machine can read them."""
        base_state: Any = super().__getstate__()
        state: dict[str, Any] = {**base_state}
        module = state.get("module_")
        if module is not None and any(parameter.device.type != "cpu" for parameter in module.parameters()):
            state["module_"] = copy.deepcopy(module).cpu()
        return state

    # -- private -------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Mapping[str, Any]]:
        args = TrainingArguments() if self.args is None else self.args
        return {
            "args": {name: getattr(args, name) for name in _field_names(args)},
            "module_kwargs": self.module_kwargs if isinstance(self.module_kwargs, Mapping) else {},
        }

    def _train(self, data: tuple[Array, ...], outputs: int, eval_set: tuple[Array, Array] | None) -> None:
        """Create a module and train it on inputs, targets and possibly weights."""
        args = checked_arguments(self.args)
        if args.fsdp or args.parallelism is not None:
            raise UnsupportedError(
                f"{type(self).__name__} does not support sharded modules. Leave fsdp and parallelism out of args."
            )
        if args.resume != NEVER:
            raise ConfigurationError(
                f"{type(self).__name__}.fit trains a new module each time, so args must not set resume (got "
                f"{args.resume!r}). Leave it out."
            )
        with _seeded(args):
            trainer = self._trainer(
                _Weighted if len(data) == 3 else Trainer,
                self._new_module(data[0].shape[1], outputs),
                args,
                train_dataset=data,
                eval_dataset=eval_set,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                metrics=self.metrics,
            )
            try:
                self.result_ = trainer.fit()
                self.module_ = trainer.unwrapped_model
            finally:
                trainer.accelerator.release()

    def _new_module(self, *sizes: int) -> nn.Module:
        options = self.module_kwargs or {}
        if isinstance(self.module, nn.Module) or not callable(self.module):
            raise ConfigurationError(
                f"{type(self).__name__}(module=…) must be a class of modules, or a function that creates one, since "
                f"each fit trains a new module (got a {type(self.module).__name__}). Give "
                "lambda n_features, n_outputs: …"
            )
        try:
            inspect.signature(self.module).bind(*sizes, **options)
        except TypeError as error:
            raise SignatureError(
                f"module must take the numbers of features and outputs, {sizes}, and module_kwargs {dict(options)} "
                f"(got {getattr(self.module, '__name__', 'it')}{inspect.signature(self.module)}): {error}."
            ) from None
        return self.module(*sizes, **options)

    def _read(self, *data: Any, **options: Any) -> Any:
        """Return inputs and targets as arrays; inputs in 32 bits, the type of modules."""
        return validate_data(self, *data, dtype=np.float32, allow_nd=True, **options)  # images have more dimensions

    def _trainer(self, kind: type[Trainer], module: nn.Module, args: TrainingArguments, **options: Any) -> Trainer:
        callbacks = copy.deepcopy(list(self.callbacks or ()))  # copies, since callbacks keep the state of a fit
        loss_fn = type(self)._loss if self.loss_fn is None else self.loss_fn
        trainer = kind(module, args, loss_fn=loss_fn, callbacks=callbacks, **options)
        for callback in [] if self.verbose else list(trainer.events):
            if callback.is_display and not any(callback is own for own in callbacks):
                trainer.events.remove(callback)
        return trainer

    def _outputs(self, X: Any, columns: int) -> Array:
        """Return the module's outputs, one row per sample."""
        check_is_fitted(self)
        inputs: Array = self._read(X, reset=False)
        # Not compiled: each call would compile again.
        args = dataclasses.replace(checked_arguments(self.args), compile=False)
        trainer = self._trainer(Trainer, self.module_, args)
        try:
            outputs = trainer.predict(inputs).predictions
        finally:
            trainer.accelerator.release()
        if getattr(outputs, "shape", None) != (len(inputs), columns):
            shape = getattr(outputs, "shape", type(outputs).__name__)
            raise ConfigurationError(
                f"The module's outputs for {len(inputs)} samples must have the shape {(len(inputs), columns)} (got "
                f"{shape}). Return {columns} for each sample."
            )
        return outputs


class TrainerClassifier(ClassifierMixin, _Estimator):
    """A scikit-learn classifier whose module a `Trainer` trains.

    `fit` equals, bit for bit, `set_seed(seed)`, creating the module, and fitting a `Trainer` on 32-bit inputs and class
    indices; it restores the process's random generators. You can clone and pickle the classifier, search its
    parameters, and use it in a pipeline.

    Args:
        module: A class of modules, or a function that creates one; called with the numbers of features and classes. It
            returns one score (logit) for each class.
        args: The training arguments; each one is a parameter too: `args__learning_rate`.
        module_kwargs: Further arguments of `module`; each one is a parameter too: `module_kwargs__hidden`.
        loss_fn: The loss; by default cross-entropy.
        optimizer: A function from parameters to an optimizer; by default the one that `args` names.
        scheduler: A function from an optimizer to a schedule; by default the one that `args` names.
        metrics: The metrics for `fit`'s `eval_set`.
        callbacks: Callbacks; each fit uses copies of them.
        verbose: Whether to show the progress of training.

    Attributes:
        classes_: The labels, sorted.
        n_features_in_: The number of features.
        module_: The trained module.
        result_: The `FitResult`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(64, 4))
        >>> y = np.where(X.sum(axis=1) > 0, "above", "below")
        >>> args = TrainingArguments(num_train_epochs=10, learning_rate=0.1, use_cpu=True)
        >>> model = TrainerClassifier(torch.nn.Linear, args).fit(X, y)
        >>> bool(model.score(X, y) > 0.9), model.classes_.tolist(), model.predict_proba(X).shape
        (True, ['above', 'below'], (64, 2))
    """

    classes_: "NDArray[Any]"

    _loss = staticmethod(functional.cross_entropy)

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: tuple[Any, Any] | None = None) -> Self:
        """Train a new module.

        Args:
            X: Inputs, one row per sample.
            y: Labels.
            sample_weight: How much each sample counts in the loss.
            eval_set: Inputs and labels to evaluate on while training, for callbacks such as `EarlyStopping`.
        """
        inputs, labels = self._read(X, y)
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        data = (inputs, targets.astype(np.int64), *_weights(sample_weight, inputs))
        self._train(data, len(self.classes_), None if eval_set is None else self._evaluated(*eval_set))
        return self

    def predict(self, X: Any) -> Array:
        """Return the label of each sample."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(axis=1)]

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, in the order of `classes_`, for each sample."""
        return torch.softmax(torch.from_numpy(self._scores(X)).double(), dim=1).numpy()

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self)
        return self._outputs(X, len(self.classes_))

    def _evaluated(self, X: Any, y: Any) -> tuple[Array, Array]:
        inputs, labels = self._read(X, y, reset=False)
        if foreign := set(labels.tolist()) - set(self.classes_.tolist()):
            raise ConfigurationError(f"eval_set has a class {foreign.pop()!r}, which is not in y.")
        return inputs, np.asarray(np.searchsorted(self.classes_, labels))


class TrainerRegressor(RegressorMixin, _Estimator):
    """A scikit-learn regressor whose module a `Trainer` trains.

    `fit` equals, bit for bit, `set_seed(seed)`, creating the module, and fitting a `Trainer` on 32-bit inputs and
    targets. The module's targets have the shape (samples, targets), even with one target per sample.

    Args:
        module: A class of modules, or a function that creates one; called with the numbers of features and targets. It
            returns one output for each target.
        args: See `TrainerClassifier`.
        module_kwargs: See `TrainerClassifier`.
        loss_fn: The loss; by default the mean squared error.
        optimizer: See `TrainerClassifier`.
        scheduler: See `TrainerClassifier`.
        metrics: See `TrainerClassifier`.
        callbacks: See `TrainerClassifier`.
        verbose: See `TrainerClassifier`.

    Attributes:
        n_features_in_: The number of features.
        module_: The trained module.
        result_: The `FitResult`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(64, 4))
        >>> args = TrainingArguments(num_train_epochs=30, learning_rate=0.1, use_cpu=True)
        >>> bool(TrainerRegressor(torch.nn.Linear, args).fit(X, X.sum(axis=1)).score(X, X.sum(axis=1)) > 0.9)
        True
    """

    _loss = staticmethod(functional.mse_loss)

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: tuple[Any, Any] | None = None) -> Self:
        """Train a new module.

        Args:
            X: Inputs, one row per sample.
            y: Target numbers, one or several per sample.
            sample_weight: How much each sample counts in the loss.
            eval_set: Inputs and numbers to evaluate on while training, for callbacks such as `EarlyStopping`.
        """
        inputs, numbers = self._checked(X, y)
        targets = _in_columns(numbers)
        evaluated = None
        if eval_set is not None:
            eval_inputs, eval_numbers = self._checked(*eval_set, reset=False)
            evaluated = eval_inputs, _in_columns(eval_numbers)
        self._train((inputs, targets, *_weights(sample_weight, inputs)), targets.shape[1], evaluated)
        self._shape = numbers.shape[1:]
        return self

    def predict(self, X: Any) -> Array:
        """Return the predicted number or numbers of each sample, in the shape of `fit`'s `y`."""
        check_is_fitted(self)
        outputs = self._outputs(X, self._shape[0] if self._shape else 1)
        return outputs.astype(np.float64).reshape(-1, *self._shape)

    def _checked(self, X: Any, y: Any, reset: bool = True) -> tuple[Array, Array]:
        return self._read(X, y, reset=reset, y_numeric=True, multi_output=True)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of this estimator."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _Weighted(Trainer):
    """Trains on inputs, targets and sample weights: a batch's loss is the weighted mean over its samples."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch; evaluation batches have no weights."""
        if len(batch) == 2:
            return super().compute_loss(model, batch)
        inputs, targets, weights = batch
        outputs = model(inputs)
        losses = self._loss_per_sample(outputs, targets).flatten(1 if targets.ndim > 1 else 0)
        losses = losses.mean(dim=1) if losses.ndim > 1 else losses
        return LossResult((losses * weights).sum(), weights.sum(), outputs)

    @functools.cached_property
    def _loss_per_sample(self) -> Callable[[Any, Any], torch.Tensor]:
        loss_fn: Any = self.loss_fn
        function, options = getattr(loss_fn, "func", loss_fn), getattr(loss_fn, "keywords", {})
        if summed(loss_fn) is None or getattr(function, "weight", options.get("weight")) is not None:
            raise ConfigurationError(
                f"sample_weight needs a loss per sample, and {getattr(function, '__name__', type(function).__name__)} "
                "returns only a mean. Give one of torch's loss functions without class weights, or leave loss_fn out."
            )
        if not isinstance(loss_fn, nn.Module):
            return functools.partial(loss_fn, reduction="none")
        unreduced: Any = copy.deepcopy(loss_fn).to(self.accelerator.device)
        unreduced.reduction = "none"
        return unreduced


def _field_names(args: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(args)] if dataclasses.is_dataclass(args) else []


def _in_columns(numbers: Array) -> Array:
    return numbers.astype(np.float32).reshape(len(numbers), -1)


def _weights(sample_weight: Any, inputs: Array) -> tuple[Array, ...]:
    if sample_weight is None:
        return ()
    return (_check_sample_weight(sample_weight, inputs, dtype=np.float32, ensure_non_negative=True),)


@contextmanager
def _seeded(args: TrainingArguments) -> Generator[None]:
    """Seed the process's generators inside the block, and restore their states after it."""
    if args.seed is None:
        yield
        return
    with preserved_generators(PartialState(args.use_cpu).device):
        set_seed(args.seed)
        yield
