"""Converting a Hugging Face Trainer: its model, arguments, data and callbacks."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.callbacks.label_smoothing import LabelSmoothing
from trainer_lib.callbacks.neftune import NEFTune
from trainer_lib.events import Callback
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.public_names.signatures import parameter_names
from trainer_lib.logging import get_logger
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.evaluation.prediction_results import EvaluationPrediction
from trainer_lib.trainer.huggingface.transformers_kinds import is_transformers_kind
from trainer_lib.trainer.overridable import is_overridden

_logger = get_logger(__name__)

# Methods that subclasses of Hugging Face's Trainer override -> the method to override here.
_VERBS = {
    "compute_loss": "compute_loss",
    "training_step": "training_step",
    "prediction_step": "evaluation_step",
    "evaluation_loop": "evaluation_step",
    "get_train_dataloader": "train_dataloader",
    "get_eval_dataloader": "eval_dataloader",
    "get_test_dataloader": "eval_dataloader",
    "get_batch_samples": "train_dataloader",
    "_get_train_sampler": "train_dataloader",
    "_get_eval_sampler": "eval_dataloader",
    "create_optimizer": "configure_optimizer",
    "create_scheduler": "configure_scheduler",
    "create_optimizer_and_scheduler": "configure_optimizer",
    "get_decay_parameter_names": "configure_optimizer",
}
# Functions given to Hugging Face's Trainer that are called differently here -> the option, the method, and the advice.
_OTHER_CALLS = {
    "preprocess_logits_for_metrics": (
        None,
        "evaluation_step",
        "an evaluation_step of your own that returns dataclasses.replace(output, predictions=…), where output is "
        "super().evaluation_step(model, batch)",
    ),
    "optimizer_cls_and_kwargs": ("optimizer", "configure_optimizer", "optimizer=…, a function of the parameters"),
}
# Hugging Face callbacks that this library replaces: control flow, progress display, saving at a signal.
_OWN_FLOW = (
    "DefaultFlowCallback",
    "ProgressCallback",
    "NotebookProgressCallback",
    "PrinterCallback",
    "JITCheckpointCallback",
)


def trainer_options(foreign: Any, ours: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `ours(**options)` that train like a Hugging Face Trainer.

    Args:
        foreign: A `transformers.Trainer`, or an object of a derived class.
        ours: The class of trainer to make.
        given: Options that replace those of the Hugging Face Trainer.

    Raises:
        ConfigurationError: If it is not a `transformers.Trainer`, or overrides something that `ours` does not.
    """
    _check(foreign, ours, given)
    theirs, changing = (foreign.args, []) if "callbacks" in given else _parted(foreign)
    args = given["args"] if "args" in given else TrainingArguments.from_transformers(theirs)
    options: dict[str, Any] = {
        "model": _model(foreign),
        "args": args,
        "train_dataset": foreign.train_dataset,
        "eval_dataset": foreign.eval_dataset,
        "collate_fn": foreign.data_collator,
        "processing_class": foreign.processing_class,
        "loss_fn": _loss_function(foreign),
        "compute_metrics": _metrics_function(foreign),
        "callbacks": [*_callbacks(foreign, args), *changing],
        **_optimizers(foreign, given),
    }
    return {name: value for name, value in options.items() if value is not None} | dict(given)


def _check(foreign: Any, ours: type, given: Mapping[str, Any]) -> None:
    kind = type(foreign)
    if not is_transformers_kind(kind, "Trainer"):
        raise ConfigurationError(f"from_transformers takes a transformers.Trainer, got a {kind.__name__}.")
    if foreign.model is None:
        raise ConfigurationError(f"{kind.__name__} has no model: it makes it by model_init, for each search. Make one.")
    _check_methods(kind, ours)
    for name, (option, verb, instead) in _OTHER_CALLS.items():
        if getattr(foreign, name, None) is not None and option not in given and not is_overridden(ours, verb):
            raise ConfigurationError(f"{kind.__name__} has {name}, which is called in another way here: {instead}.")


def _check_methods(kind: type, ours: type) -> None:
    """Check that `ours` overrides the equivalents of overridden methods; warn of methods without an equivalent."""
    from transformers import Trainer as Theirs

    own = [cls for cls in kind.__mro__ if not cls.__module__.startswith("transformers.")]
    changed = [name for cls in own for name in vars(cls) if callable(getattr(Theirs, name, None)) and name[:2] != "__"]
    missing = [name for name in changed if name in _VERBS and not is_overridden(ours, _VERBS[name])]
    if missing:
        raise ConfigurationError(
            f"{kind.__name__} overrides {', '.join(missing)}, which is called in another way here. Derive a class from "
            f"trainer_lib.Trainer that overrides {', '.join(dict.fromkeys(_VERBS[name] for name in missing))}, and "
            "call from_transformers of that."
        )
    if unknown := [name for name in changed if name not in _VERBS]:
        _logger.warning(
            "%s overrides %s, which nothing calls here. A callback may do it, or a method of a class of your own.",
            kind.__name__,
            ", ".join(unknown),
        )


def _model(foreign: Any) -> Any:
    """Return its model, without the wrappers that training or evaluation added."""
    if not getattr(foreign.model, "_is_accelerate_prepared", False):
        return foreign.model
    model = foreign.accelerator.unwrap_model(foreign.model, keep_fp32_wrapper=False)
    model.__dict__.pop("_is_accelerate_prepared", None)
    return model


def _parted(foreign: Any) -> tuple[Any, list[Callback]]:
    """Return the arguments without those that are callbacks here, and these callbacks."""
    theirs = foreign.args
    rest, changing = copy.copy(theirs), list[Callback]()
    # A compute_loss_func computes the whole loss there; for several labels a sample, nothing is smoothed there.
    if foreign.label_smoother is not None and foreign.compute_loss_func is None:
        changing.append(LabelSmoothing(theirs.label_smoothing_factor))
    if theirs.neftune_noise_alpha:
        changing.append(NEFTune(theirs.neftune_noise_alpha))
    rest.label_smoothing_factor, rest.neftune_noise_alpha = 0.0, None
    return rest, changing


def _callbacks(foreign: Any, args: TrainingArguments) -> list[Any]:
    """Return its callbacks, except those that this library replaces."""
    return [
        callback
        for callback in foreign.callback_handler.callbacks
        if not (type(callback).__name__ in _OWN_FLOW and type(callback).__module__.startswith("transformers."))
        and _tracker_of(callback) not in args.report_to
    ]


def _tracker_of(callback: Any) -> str | None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return next((name for name, kind in INTEGRATION_TO_CALLBACK.items() if type(callback) is kind), None)


def _loss_function(foreign: Any) -> Callable[..., Any] | None:
    """Return its `compute_loss_func`, by a signature that names `num_items_in_batch`."""
    function = foreign.compute_loss_func
    if function is None or "num_items_in_batch" in parameter_names(function):
        return function
    return functools.partial(compute_loss_func, function)


def compute_loss_func(function: Callable[..., Any], outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """Call a loss function with the count by name, as Hugging Face's Trainer does."""
    return function(outputs, labels, num_items_in_batch=num_items_in_batch)


def _metrics_function(foreign: Any) -> Callable[..., Any] | None:
    """Return its `compute_metrics`, with the parameter `compute_result` if it is called batch by batch there."""
    function = foreign.compute_metrics
    if function is None:
        return None
    return functools.partial(_computed_by_batch if foreign.args.batch_eval_metrics else _computed, function)


def _computed(compute_metrics: Callable[..., Any], prediction: EvaluationPrediction, **more: bool) -> Any:
    """Call `compute_metrics` with outputs and labels of several names in tuples, as Hugging Face's Trainer does."""
    outputs, labels = (tuple(part.values()) if isinstance(part, dict) else part for part in prediction)
    return compute_metrics(EvaluationPrediction(outputs, labels), **more)


def _computed_by_batch(
    compute_metrics: Callable[..., Any], prediction: EvaluationPrediction, compute_result: bool
) -> Any:
    return _computed(compute_metrics, prediction, compute_result=compute_result)


def _optimizers(foreign: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer and the schedule that were given to it."""
    if "optimizer" in given or foreign.optimizer is None:
        return {}
    if type(foreign.optimizer).__module__.startswith("accelerate."):  # it has trained with it
        _logger.warning(
            "This %s has trained already: its weights are kept; the optimizer and the schedule start from scratch.",
            type(foreign).__name__,
        )
        return {}
    return {"optimizer": foreign.optimizer, "scheduler": foreign.lr_scheduler}
