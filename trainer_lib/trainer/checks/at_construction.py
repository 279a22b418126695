"""This file is what may be given to a `Trainer`, checked when it is given: nothing has been touched by then."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainer_lib.accelerator import Accelerator
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, did_you_mean
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks.foreign_calls import check_overrides
from trainer_lib.trainer.checks.foreign_names import CONSTRUCTOR, RENAMED
from trainer_lib.trainer.huggingface.callback_adapter import adapt_callback, is_transformers_kind
from trainer_lib.trainer.losses.loss_result import summed
from trainer_lib.trainer.safety.deadline import check_ahead

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_NO_NAME = (
    "accelerator must be a trainer_lib.Accelerator, got a str. An accelerator of the machine is found without a name; "
    "TrainingArguments(use_cpu=True) stays on the CPU."
)
_VERBS = {
    "compute_loss": ("model", "batch"),
    "training_step": ("model", "batch"),
    "evaluation_step": ("model", "batch"),
    "num_items": ("batch",),
    "configure_optimizer": (),
    "configure_scheduler": ("optimizer", "total_steps", "name"),
    "train_dataloader": (),
    "eval_dataloader": ("dataset",),
}


def check(trainer: "Trainer", base: "type[Trainer]") -> None:
    """Check what is given, where no subclass of `base` has a way of its own with it."""
    check_verbs(trainer)
    check_overrides(trainer, base, _VERBS, inspect.signature(base).parameters)
    if trainer.loss_fn is not None and trainer.loses_by_default:
        check_loss_function(trainer.loss_fn)
    check_collate(trainer.collate_fn)
    check_processing_class(trainer.processing_class)
    check_optimizer(trainer.optimizer)
    check_scheduler(trainer.scheduler, trainer.optimizer)
    check_ahead(trainer.args.deadline)


def check_verbs(trainer: "Trainer") -> None:
    """Check that methods of a subclass take what they are called with."""
    for verb, arguments in _VERBS.items():
        if (problem := cannot_take(getattr(trainer, verb), *arguments)) is not None:
            raise SignatureError(
                f"{type(trainer).__name__}.{verb} is called as {verb}({', '.join(arguments)}), and {problem}."
            )


def check_names(init: Callable[..., None], positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check that a constructor can be called with these arguments.

    Raises:
        SignatureError: If not, with the name that may have been meant.
    """
    parameters = list(inspect.signature(init).parameters.values())[1:]
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):  # somebody wrapped it
        return
    known = [one.name for one in parameters]
    if strange := [name for name in named if name not in known]:
        lines = [f"Trainer takes no {name!r}.{_instead(name, known)}" for name in strange]
        raise SignatureError("\n".join([*lines, *([_NO_NAME] if isinstance(named.get("accelerator"), str) else [])]))
    in_order = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(positional) > len(in_order):
        raise SignatureError(
            f"Trainer takes {' and '.join(in_order)} in order and all else by name, and got a "
            f"{type(positional[len(in_order)]).__name__} after them. Say what it is, such as train_dataset=…."
        )


def checked_arguments(args: Any) -> TrainingArguments:
    """Return the arguments, or the default ones; those of Hugging Face's Trainer are converted."""
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingArguments):
        return args
    if is_transformers_kind(type(args), "TrainingArguments"):
        return TrainingArguments.from_transformers(args)
    if isinstance(args, Mapping):
        hint = " Give TrainingArguments(**args)."
    elif isinstance(args, type):
        hint = f" That is a class. Give an object: {args.__name__}(…)."
    elif isinstance(args, str) or hasattr(args, "__fspath__"):
        hint = f" To read a file: TrainingArguments.from_file({str(args)!r})."
    else:
        hint = " Data and all else goes by name, such as train_dataset=…."
    raise ConfigurationError(f"args must be trainer_lib.TrainingArguments, got a {type(args).__name__}.{hint}")


def checked_model(model: Any) -> nn.Module | Mapping[str, nn.Module]:
    """Return the model, or the models by name."""
    if isinstance(model, nn.Module):
        return model
    hint = ""
    if isinstance(model, type):
        hint = f" Give an object: {model.__name__}(…)."
    elif isinstance(model, str):
        hint = f" Load it first, such as AutoModel.from_pretrained({model!r})."
    elif isinstance(model, Mapping):
        wrong = [name for name, one in model.items() if not isinstance(one, nn.Module)]
        if model and not wrong:
            return model
        hint = f" {wrong[0]!r} is a {type(model[wrong[0]]).__name__}." if wrong else " It is empty."
    raise ConfigurationError(
        f"model must be a torch.nn.Module, or several by name, got a {type(model).__name__}.{hint}"
    )


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list, those of Hugging Face's Trainer adapted; the dispatcher checks what is in it."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        made = {id(one): adapt_callback(one) for one in callbacks}
        return [made[id(one)] for one in callbacks]  # the same object twice stays the same
    hint = f" Give [{type(callbacks).__name__}(…)]." if not isinstance(callbacks, (Mapping, str)) else ""
    raise ConfigurationError(f"callbacks must be a list of callbacks, got a {type(callbacks).__name__}.{hint}")


def check_loss_function(loss_fn: Any) -> None:
    """Check what is called as `loss_fn(outputs, targets)` to get a mean.

    Raises:
        ConfigurationError: If it is no function, or does not average.
        SignatureError: If it takes something else.
    """
    if isinstance(loss_fn, type):
        raise ConfigurationError(f"loss_fn is the class {loss_fn.__name__}. Give an object: {loss_fn.__name__}().")
    if not callable(loss_fn):
        by_name = f" Give the function: torch.nn.functional.{loss_fn}." if isinstance(loss_fn, str) else ""
        raise ConfigurationError(
            f"loss_fn must be a function of outputs and targets, got a {type(loss_fn).__name__}."
            + (by_name or " For example torch.nn.functional.cross_entropy.")
        )
    function: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if (problem := cannot_take(function, "outputs", "targets")) is not None:
        raise SignatureError(
            f"loss_fn is called as loss_fn(outputs, targets), and {_called(loss_fn)}{problem}. To give it more, "
            "override compute_loss(model, batch)."
        )
    summed(loss_fn)


def check_collate(collate_fn: Any) -> None:
    """Check what is called with a list of samples."""
    if isinstance(collate_fn, type):
        raise ConfigurationError(
            f"collate_fn is the class {collate_fn.__name__}. Give an object: {collate_fn.__name__}(…)."
        )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigurationError(
            f"collate_fn={shown(collate_fn)} must be a function from a list of samples to a batch."
        )
    if collate_fn is not None and (problem := cannot_take(collate_fn, "samples")) is not None:
        raise SignatureError(
            f"collate_fn is called with a list of samples, and {_called(collate_fn)}{problem}. What else it needs is "
            "given beforehand, by functools.partial."
        )


def check_optimizer(optimizer: Any) -> None:
    """Check what optimizers are made by, or are."""
    for name, one in _by_name(optimizer):
        if isinstance(one, (list, tuple)):
            raise ConfigurationError(
                f"{_told('optimizer', name)} is a {type(one).__name__}. Give one optimizer, or several by name; a "
                "schedule is given as scheduler=…."
            )
        if one is not None and not isinstance(one, Optimizer) and not callable(one):
            hint = (
                f' By name: TrainingArguments(optimizer="{one}").'
                if isinstance(one, str)
                else " By name: TrainingArguments(optimizer=…)."
            )
            raise ConfigurationError(
                f"{_told('optimizer', name)} must be an Optimizer, or a function that makes one of parameters, got a "
                f"{type(one).__name__}.{hint}"
            )
        if callable(one) and not isinstance(one, Optimizer) and (problem := cannot_take(one, "parameters")):
            raise SignatureError(
                f"{_told('optimizer', name)} is called with the parameters, and {_called(one)}{problem}. Give lambda "
                "parameters: ….",
            )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Check what schedules are made by, or are."""
    for name, one in _by_name(scheduler):
        told = _told("scheduler", name)
        if one is None or _is_schedule(one):
            own = optimizer.get(name) if isinstance(optimizer, Mapping) else optimizer
            if one is not None and not isinstance(own, Optimizer):
                raise ConfigurationError(
                    f"{told} is a {type(one).__name__} of an optimizer that was made already, and that optimizer is "
                    "not given. Give optimizer=… too, or a function: scheduler=lambda optimizer: ….",
                )
            if one is not None and getattr(one, "optimizer", own) is not own:
                raise ConfigurationError(
                    f"{told} is a {type(one).__name__} of another optimizer than the one given: it would move the "
                    "learning rate of that one."
                )
        elif not callable(one):
            by_name = f"{one}" if isinstance(one, str) else "…"
            raise ConfigurationError(
                f"{told} must be a schedule, or a function that makes one of an optimizer, got a "
                f'{type(one).__name__}. By name: TrainingArguments(lr_scheduler="{by_name}").'
            )
        elif (problem := cannot_take(one, "optimizer")) is not None:
            raise SignatureError(
                f"{told} is called with the optimizer, and {_called(one)}{problem}. Give lambda optimizer: "
                f"{getattr(one, '__name__', 'make')}(optimizer, …).",
            )


def check_accelerator(accelerator: Any, args: TrainingArguments) -> None:
    """Check an engine that is given, and that arguments do not ask for another.

    Raises:
        ConfigurationError: If it is none, or arguments say otherwise.
    """
    if not isinstance(accelerator, Accelerator):
        hint = " Give an object: Accelerator(…)." if isinstance(accelerator, type) else ""
        if isinstance(accelerator, str):
            raise ConfigurationError(_NO_NAME)
        raise ConfigurationError(
            f"accelerator must be a trainer_lib.Accelerator, got a {type(accelerator).__name__}.{hint}"
        )
    there = {
        "mixed_precision": accelerator.mixed_precision,
        "use_cpu": accelerator.device.type == "cpu",
        "seed_each_sample": accelerator.dataloader_config.seed_each_sample,
    }
    asked = {"mixed_precision": args.mixed_precision}
    asked |= {name: getattr(args, name) or None for name in ("use_cpu", "seed_each_sample")}
    asked |= {name: getattr(args, name) or None for name in ("compile", "fsdp", "parallelism", "ddp")}
    for name, value in asked.items():
        if value is not None and value != there.get(name):
            raise ConfigurationError(
                f"{name}={shown(value)} is for an engine that is made from the arguments, and accelerator=… gives one "
                f"that is made{f' with {there[name]!r}' if name in there else ''}. Say it there: Accelerator(…)."
            )
    steps = accelerator.gradient_accumulation_steps
    if steps > 1 and args.gradient_accumulation_steps is None and args.global_batch_size is None:
        raise ConfigurationError(
            f"accelerator=… accumulates {steps} batches, and the arguments say nothing of it, which means 1. Give "
            f"TrainingArguments(gradient_accumulation_steps={steps}), or 1."
        )


def check_processing_class(processing_class: Any) -> None:
    """Check what is saved with the model."""
    if isinstance(processing_class, (str, type)):
        name = processing_class if isinstance(processing_class, str) else processing_class.__name__
        raise ConfigurationError(
            f"processing_class must be a tokenizer or processor, got {name!r}. Load it first, such as "
            "AutoTokenizer.from_pretrained(…)."
        )


def cannot_take(function: Any, *arguments: str) -> str | None:
    """Return why a function cannot be called with these positional arguments; `None` if it can, or cannot be asked."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is none of Python's
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"{signature} does not fit: {error}"
    return None


def _called(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "" if name == "<lambda>" else name


def _instead(name: str, known: Sequence[str]) -> str:
    if name in CONSTRUCTOR:
        return f" That is {CONSTRUCTOR[name]} here."
    ours = RENAMED.get(name, name)
    if ours in TrainingArguments.__dataclass_fields__:
        return f" It is one of the arguments: Trainer(model, TrainingArguments({ours}=…))."
    return did_you_mean(name, known) or f" It takes: {', '.join(known)}."


def _by_name(given: Any) -> list[tuple[str, Any]]:
    return list(given.items()) if isinstance(given, Mapping) else [("", given)]


def _told(what: str, name: str) -> str:
    return f"{what}[{name!r}]" if name else what


def _is_schedule(one: Any) -> bool:
    return hasattr(one, "step") and not isinstance(one, type)
