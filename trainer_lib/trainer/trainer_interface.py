"""What other modules know of a `Trainer`: what it is given, what it is made of, and the methods that users override."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.events import Callback, Dispatcher, Run
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import UnknownMemberError
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.evaluation.evaluation_plan import EvaluationPlan
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.losses.loss_result import LossResult, Weight
from trainer_lib.trainer.metrics.running_means import RunningMeans
from trainer_lib.trainer.overridable import DEFAULTS
from trainer_lib.trainer.prepared_models import PreparedModels

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator
    from trainer_lib.trainer.data.worker_count import WorkerCount
    from trainer_lib.trainer.evaluation.eval_loop import Evaluator
    from trainer_lib.trainer.losses.batch_loss import BatchLoss
    from trainer_lib.trainer.losses.batch_parts import BatchParts
    from trainer_lib.trainer.losses.label_shift import LabelShift
    from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard


@dataclass(eq=False)
class TrainerParts:
    """What a trainer is made of.

    Attributes:
        loss: The loss of a batch.
        evaluation: What is evaluated.
        make_evaluator: Returns what evaluates and predicts; called when it is first needed.
        means: The means that the next log shows.
        arguments: The values, at the last call, of the arguments from which parts were made.
        default_callbacks: The callbacks that were made from arguments.
        owns_accelerator: Whether the accelerator was made from the arguments.
        models: The prepared models.
        batches: What a rank computes of each training batch; since the first fit began.
        guard: The guard of the current run; `None` unless it reads losses.
        run_folder: The folder of the last run; `None` without one.
        worker_counts: The worker processes that `num_workers="auto"` chose in the last call, by the identity of the
            dataset and the batch size.
        generation_options: The arguments of `generate` in the current evaluation or prediction.
        has_fitted: Whether `fit` was called.
        in_sandbox: Whether a tool, such as the learning-rate finder, trains.
    """

    loss: "BatchLoss"
    evaluation: EvaluationPlan
    make_evaluator: Callable[[], "Evaluator"]
    means: RunningMeans
    arguments: Mapping[str, Any]
    default_callbacks: Sequence[Callback]
    owns_accelerator: bool
    models: PreparedModels = field(default_factory=PreparedModels)
    batches: "BatchParts" = field(init=False)
    guard: "NonFiniteGuard | None" = None
    run_folder: AnyPath | None = None
    worker_counts: "dict[tuple[int, int], WorkerCount]" = field(default_factory=dict[Any, Any])
    generation_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_fitted: bool = False
    in_sandbox: bool = False

    @functools.cached_property
    def evaluator(self) -> "Evaluator":
        """Evaluates and predicts."""
        return self.make_evaluator()

    def forget_evaluator(self) -> None:
        """Let the next evaluation begin with a new evaluator."""
        self.__dict__.pop("evaluator", None)


class TrainerInterface(Protocol):
    """A `Trainer`, for modules that it imports."""

    model: nn.Module | Mapping[str, nn.Module]
    args: TrainingArguments
    train_dataset: Any
    eval_dataset: Any
    loss_fn: Callable[[Any, Any], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    processing_class: Any
    metrics: Any
    compute_metrics: Callable[..., Mapping[str, float]] | None
    optimizer: Any
    scheduler: Any
    accelerator: "Accelerator"
    events: Dispatcher
    run: Run
    parts: TrainerParts

    @property
    def fit(self) -> Callable[..., Any]:
        """Trains."""
        ...

    @property
    def evaluate(self) -> Callable[..., dict[str, float]]:
        """Evaluates a dataset, or several by name."""
        ...

    @property
    def log(self) -> Callable[..., None]:
        """Logs a value."""
        ...

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model; the first if there are several."""
        ...

    @functools.cached_property
    def label_shift(self) -> "LabelShift":
        """Whether the model compares each position with the label of the next."""
        ...

    def compute_loss(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch."""
        ...

    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        """Compute the gradients of a batch."""
        ...

    def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
        """Return the loss, predictions and labels of a batch."""
        ...

    def num_items(self, batch: Any) -> Weight:
        """Return the number of items in the mean loss of a batch."""
        ...

    def configure_optimizer(self) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer, or several by name."""
        ...

    def configure_scheduler(self, optimizer: Optimizer, total_steps: int | None, name: str = "default") -> Any:
        """Return the schedule of an optimizer, or `None`."""
        ...

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data."""
        ...

    def eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of evaluation data."""
        ...

    @property
    def model_card(self) -> Callable[..., str]:
        """Makes the model card."""
        ...

    def save_model(self, output_dir: str | AnyPath | None = None) -> None:
        """Save the model."""
        ...


def evaluator_of(trainer: TrainerInterface) -> "Evaluator":
    """Return a new evaluator of a trainer."""
    from trainer_lib.trainer import defaults
    from trainer_lib.trainer.evaluation.eval_loop import Evaluator

    is_own = getattr(trainer.evaluation_step, "__func__", None) is not DEFAULTS["evaluation_step"]
    if not is_own:
        of_loss = functools.partial(defaults.evaluation_output, trainer, keeps_outputs=False)
        return Evaluator(trainer.accelerator, trainer.events, trainer.evaluation_step, of_loss)

    def step(model: Any, batch: Any) -> EvaluationOutput:
        with trainer.parts.means.apart(batch) as logged:
            output = trainer.evaluation_step(model, batch)
        return replace(output, logged=logged) if logged else output

    return Evaluator(trainer.accelerator, trainer.events, step)


class Assigned:
    """An attribute that parts of a trainer are made from: when it is set, they are made again from the new value.

    There is no `__get__`: Python reads the attribute as any other, at no cost.

    Args:
        forget: Forgets what was made from the former value.
        check: Raises if a value is invalid, or cannot be set now; the constructor checks its arguments itself.
    """

    def __init__(
        self, forget: Callable[[TrainerInterface], None], check: Callable[[TrainerInterface, Any], None] | None = None
    ) -> None:
        self._forget, self._check = forget, check

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the attribute."""
        self._name = name

    def __set__(self, trainer: TrainerInterface, value: Any) -> None:
        """Set the attribute."""
        is_made = "parts" in vars(trainer)
        if is_made and self._check is not None:
            self._check(trainer, value)
        vars(trainer)[self._name] = value
        if is_made:
            self._forget(trainer)


class Unsettable:
    """An attribute of other trainers that nothing reads here: setting it is an error, and there is nothing to read.

    Args:
        instead: What to write instead.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the attribute."""
        self._name = name

    def __get__(self, trainer: object, owner: type) -> NoReturn:
        """Let Python look further, and find nothing."""
        raise AttributeError(self._name)

    def __set__(self, trainer: object, value: Any) -> NoReturn:
        """Say what to write instead."""
        raise UnknownMemberError(
            f"{type(trainer).__name__} has no attribute {self._name!r}, so setting it has no effect. {self._instead}"
        )


def forget_prepared(trainer: TrainerInterface) -> None:
    """Let the next call prepare the model, with an engine that holds nothing."""
    trainer.accelerator.free_memory()
    trainer.parts.models = PreparedModels()
    trainer.parts.forget_evaluator()


def forget_model(trainer: TrainerInterface) -> None:
    """Let the next call prepare the model, and forget what was learned about the former one."""
    if trainer.parts.models.are_prepared:
        forget_prepared(trainer)
    forget_loss(trainer)


def forget_loss(trainer: TrainerInterface) -> None:
    """Let the next batch use the loss function and the model that there are then."""
    trainer.parts.loss.forget()
    vars(trainer).pop("label_shift", None)


def forget_measures(trainer: TrainerInterface) -> None:
    """Let the next evaluation use the metrics and the sets that there are then."""
    trainer.parts.evaluation.forget_measures()
